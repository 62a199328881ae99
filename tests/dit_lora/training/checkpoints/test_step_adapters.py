"""The adapter next to a checkpoint's state: written with it, kept when the state is pruned, never needed to resume."""

from pathlib import Path

import pytest
import torch

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE
from dit_lora.errors import DitLoraError
from dit_lora.training.checkpoints.files import (
    SavedState,
    Tensors,
    find_checkpoint,
    find_newest_checkpoint,
    is_complete_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    remove_checkpoints_after,
    save_checkpoint,
)


def make_state(value: float) -> SavedState:
    weight = torch.full((2,), float(value))
    return SavedState({"a": weight, "b": weight.clone()}, {"adapter/a/step": torch.ones(())}, {"ema/a": weight / 2})


def write_adapter(folder: Path, weights: Tensors) -> None:
    (folder / ADAPTER_FILE).write_text(repr({name: tensor.tolist() for name, tensor in weights.items()}))


def save(run: Path, step: int, keep: int = 1) -> Path:
    return save_checkpoint(run, step, make_state(step), {}, keep=keep, write_adapter=write_adapter)


def list_folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_adapters_of_the_averages_stay_when_the_state_is_pruned(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    assert list(list_checkpoints(tmp_path)) == [4]
    assert find_checkpoint("auto", tmp_path) == paths[3]
    assert [[file.name for file in path.iterdir()] for path in paths[:3]] == [[ADAPTER_FILE]] * 3
    assert (paths[1] / ADAPTER_FILE).read_text() == "{'a': [1.0, 1.0], 'b': [2.0, 2.0]}"
    with pytest.raises(DitLoraError, match=r"has only the adapter, which a new run can start from \(lora.init="):
        find_checkpoint(str(paths[0]), tmp_path)
    prune_checkpoints(tmp_path, 4, keep=1, keep_adapters=5)
    assert list_folders(tmp_path) == [path.name for path in paths]
    prune_checkpoints(tmp_path, 4, keep=1, keep_adapters=2)
    assert list_folders(tmp_path) == ["step_000002", "step_000003", "step_000004"]
    # A rollback deletes the adapters of another trajectory too.
    remove_checkpoints_after(tmp_path, 2)
    assert list_folders(tmp_path) == ["step_000002"]
    # The step is reached again.
    assert is_complete_checkpoint(save(tmp_path, 2))


def test_trained_base_weights_are_pruned_with_the_state(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / BASE_FILE).write_bytes(b"large")
    save(tmp_path, 2)
    assert list_folders(tmp_path) == ["step_000002"]


def test_the_state_does_not_need_the_adapter(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / ADAPTER_FILE).rename(tmp_path / "kitten.safetensors")
    assert find_newest_checkpoint(tmp_path) == path


@pytest.mark.parametrize("num_deleted", [0, 1, 4])
def test_pruning_that_died_half_way_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_deleted: int
) -> None:
    paths = [save(tmp_path, step, keep=2) for step in (1, 2)]
    unlink, deleted = Path.unlink, list[str]()

    def unlink_some(path: Path, missing_ok: bool = False) -> None:
        if len(deleted) == num_deleted:
            raise KeyboardInterrupt
        deleted.append(path.name)
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink_some)
        with pytest.raises(KeyboardInterrupt):
            prune_checkpoints(tmp_path, 2, keep=1)
    assert is_complete_checkpoint(paths[0]) == (num_deleted == 0)
    prune_checkpoints(tmp_path, 2, keep=1)
    assert list(list_checkpoints(tmp_path)) == [2]
    assert [file.name for file in paths[0].iterdir()] == [ADAPTER_FILE]


def test_weights_that_are_not_finite_give_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(DitLoraError, match="step 1 is not saved: 3 of 4 tensors are not finite"):
        save_checkpoint(tmp_path, 1, make_state(float("nan")), {}, keep=1, write_adapter=write_adapter)
    assert not (tmp_path / "checkpoints").exists()
