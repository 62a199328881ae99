"""Checkpoints are whole or passed over, and resume bit for bit or say why not."""

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.training.checkpoint_state import gather_training_state, load_training_state
from dit_lora.training.checkpoints import files
from dit_lora.training.checkpoints.files import (
    LoadedCheckpoint,
    SavedState,
    describe_similar_run,
    find_checkpoint,
    find_newest_checkpoint,
    is_complete_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    remove_checkpoints_after,
    save_checkpoint,
)
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.optim.state import drop_optimizer_state, optimizer_state

IDENTITY = {"lora.rank": 4, "optim.betas": (0.9, 0.95), "lora.targets": None}


def build() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model[0].requires_grad_(False)
    parameters = dict(model.named_parameters())
    names = ["1.weight", "1.bias"]
    group = {"name": "adapter", "params": [parameters[n] for n in names], "param_names": names}
    return model, torch.optim.AdamW([group], lr=0.1, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 9) -> Path:
    return save_checkpoint(run, step, state_of(model, optimizer), IDENTITY, keep=keep)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> SavedState:
    return gather_training_state(Engine(Accelerator(cpu=True), model, optimizer))


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> LoadedCheckpoint:
    loaded = load_checkpoint(path, IDENTITY)
    load_training_state(loaded, Engine(Accelerator(cpu=True), model, optimizer))
    return loaded


def test_a_resumed_optimizer_continues_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer, 0, 3)
    path = save(tmp_path, 3, model, optimizer)
    train(model, optimizer, 3, 6)
    rebuilt, resumed = build()
    loaded = load(path, rebuilt, resumed)
    assert (loaded.step, loaded.guard_state, loaded.launch_topology) == (3, {}, {})
    train(rebuilt, resumed, 3, 6)
    assert torch.equal(model[1].weight, rebuilt[1].weight)
    ours, theirs = optimizer_state(optimizer), optimizer_state(resumed)
    assert set(ours) == {f"adapter/1.{p}/{s}" for p in ("weight", "bias") for s in ("step", "exp_avg", "exp_avg_sq")}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_frozen_base_is_not_stored(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = save(tmp_path, 1, *build())
    assert set(load_file(path / "trainable.safetensors")) == {"1.weight", "1.bias"}
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1  # safetensors writes 0600


@pytest.mark.parametrize("file", ["trainable.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, file: str, damage: str) -> None:
    model, optimizer = build()
    train(model, optimizer, 0, 1)
    good = save(tmp_path, 1, model, optimizer)
    torn = save(tmp_path, 2, model, optimizer)
    data = (torn / file).read_bytes()
    if damage == "delete":
        (torn / file).unlink()
    elif damage == "truncate":
        (torn / file).write_bytes(data[: len(data) // 2])
    else:
        (torn / file).write_bytes(data[:-4] + bytes([data[-4] ^ 1]) + data[-3:])
    if file == "manifest.json" and damage == "flip":
        assert find_newest_checkpoint(tmp_path) in (
            good,
            torn,
        )  # white space may differ without harm
        return
    assert find_newest_checkpoint(tmp_path) == good
    with pytest.raises(DitLoraError, match=r"is incomplete or altered; the newest complete one is .*step_000001"):
        find_checkpoint(str(torn), tmp_path)


@pytest.mark.parametrize("file", ["trainable.safetensors", "optimizer.safetensors", "ema.safetensors"])
def test_a_file_that_cannot_be_loaded_is_named(tmp_path: Path, file: str) -> None:
    """The digests hold, but the file has no tensors: another program rewrote both, or the disk returns zeros."""
    model, optimizer = build()
    path = save(tmp_path, 1, model, optimizer)
    (path / file).write_bytes(bytes(64))
    with pytest.raises(DitLoraError, match=rf"^cannot read \S+step_000001/{file}: .*copy or download it again$"):
        load(path, model, optimizer)


def test_a_save_that_died_half_way_is_passed_over_and_does_not_block_the_next(
    tmp_path: Path,
) -> None:
    model, optimizer = build()
    good = save(tmp_path, 1, model, optimizer)
    leftover = tmp_path / "checkpoints" / ".step_000002.partial"
    leftover.mkdir()
    (leftover / "trainable.safetensors").write_bytes(b"half")
    half = [leftover.with_name(f".best.json.{pid}.partial") for pid in (os.getpid() + 1, os.getpid())]
    for path in half:
        path.write_text("{")
    assert find_newest_checkpoint(tmp_path) == good
    assert find_newest_checkpoint(tmp_path) != save(tmp_path, 2, model, optimizer)
    assert not leftover.exists()
    assert [path.exists() for path in half] == [False, True]  # its own it may be writing


@pytest.mark.parametrize("after_files", [0, 1, 3])
def test_a_full_disk_is_one_line_and_earlier_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_files: int
) -> None:
    model, optimizer = build()
    good = save(tmp_path, 1, model, optimizer)
    before = {path.name: path.read_bytes() for path in good.iterdir()}
    write, written = files._write_synced, []

    def fill(path: Path, data: Any) -> None:
        write(path, data)
        if len(written) == after_files:
            os.truncate(path, path.stat().st_size // 2)
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)

    monkeypatch.setattr(files, "_write_synced", fill)
    with pytest.raises(DitLoraError) as error:
        save(tmp_path, 2, model, optimizer)
    message = str(error.value)
    assert "cannot save the checkpoint of step 2" in message
    assert "No space left on device" in message
    assert f"the newest complete one is {good}" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [good.name]
    assert {path.name: path.read_bytes() for path in good.iterdir()} == before


def test_a_file_that_safetensors_cannot_write_is_one_line(tmp_path: Path) -> None:
    """Its own error, of a limit on the file's size, which acts as a full disk does."""
    model, optimizer = build()
    good = save(tmp_path, 1, model, optimizer)
    big = SavedState({"1.weight": torch.randn(64, 1024)}, {})
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, previous[1]))
    try:
        with pytest.raises(DitLoraError, match=r"cannot save the checkpoint of step 2 .*too large"):
            save_checkpoint(tmp_path, 2, big, IDENTITY, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [good.name]


@pytest.mark.parametrize("where", ["weight", "moment"])
def test_a_poisoned_state_is_never_saved(tmp_path: Path, where: str) -> None:
    model, optimizer = build()
    train(model, optimizer, 0, 1)
    good = save(tmp_path, 1, model, optimizer)
    victim = model[1].weight if where == "weight" else optimizer.state[model[1].weight]["exp_avg"]
    victim.data[0, 0] = torch.inf
    with pytest.raises(DitLoraError, match="step 2 is not saved: 1 of 8 tensors are not finite") as error:
        save(tmp_path, 2, model, optimizer)
    assert error.value.exit_code == 3
    assert find_newest_checkpoint(tmp_path) == good


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    model, optimizer = build()
    for step in (8, 9, 10, 11):
        save(tmp_path, step, model, optimizer, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step_000010",
        "step_000011",
    ]


def test_the_best_stay_beside_the_newest(tmp_path: Path) -> None:
    model, optimizer = build()
    for step in (2, 4, 6, 8, 10):
        state = state_of(model, optimizer)
        save_checkpoint(tmp_path, step, state, IDENTITY, keep=2, best_steps=[4, 8])
    assert list(list_checkpoints(tmp_path)) == [4, 8, 10]
    prune_checkpoints(tmp_path, 10, keep=1, best_steps=[8])
    assert list(list_checkpoints(tmp_path)) == [8, 10]


def test_steps_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    model, optimizer = build()
    for step in (999_998, 1_000_000):
        path = save(tmp_path, step, model, optimizer, keep=1)
    (tmp_path / "checkpoints" / "step_000003_mine").mkdir()  # a user's own
    assert list(list_checkpoints(tmp_path)) == [1_000_000]
    assert find_newest_checkpoint(tmp_path) == path


@pytest.mark.parametrize("at", ["rename", "rmtree"])
def test_a_removal_that_died_half_way_leaves_nothing_like_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    model, optimizer = build()
    paths = [save(tmp_path, step, model, optimizer) for step in (1, 2)]
    module = Path if at == "rename" else shutil

    def die(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, at, die)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoints_after(tmp_path, 1)
    steps = list_checkpoints(tmp_path)
    assert [is_complete_checkpoint(path) for path in steps.values()] == [True] * len(steps)
    assert list(steps) == ([1, 2] if at == "rename" else [1])
    save(tmp_path, 3, model, optimizer)
    assert all(path.name.startswith("step_") for path in paths[0].parent.iterdir())


def test_a_start_reads_each_file_of_the_newest_checkpoint_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of large checkpoints take minutes: of older ones nothing is read, of newer torn ones once."""
    model, optimizer = build()
    for step in (1, 2, 3):
        save(tmp_path, step, model, optimizer)
    (tmp_path / "checkpoints" / "step_000003" / "trainable.safetensors").write_bytes(b"torn")
    read, digest = [], files.compute_sha256

    def note(path: Path) -> str:
        read.append(f"{path.parent.name}/{path.name}")
        return digest(path)

    monkeypatch.setattr(files, "compute_sha256", note)
    checkpoint = find_checkpoint("auto", tmp_path)
    assert checkpoint is not None
    load(checkpoint, *build())
    assert checkpoint.name == "step_000002"
    assert len(read) == len(set(read))
    assert not any(name.startswith("step_000001") for name in read)


def test_a_save_never_removes_itself_or_what_comes_later(tmp_path: Path) -> None:
    """A resume of an earlier checkpoint passes by later ones, which stay."""
    model, optimizer = build()
    for step in (10, 20, 30):
        save(tmp_path, step, model, optimizer)
    (tmp_path / "checkpoints" / "step_000020" / "manifest.json").unlink()
    path = save(tmp_path, 12, model, optimizer, keep=1)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000012", "step_000020", "step_000030"]
    assert find_checkpoint(str(path), tmp_path) == path


def test_a_torn_checkpoint_is_replaced_when_its_step_is_saved_again(tmp_path: Path) -> None:
    model, optimizer = build()
    path = save(tmp_path, 2, model, optimizer)
    (path / "state.json").unlink()
    assert find_newest_checkpoint(tmp_path) is None
    save(tmp_path, 2, model, optimizer)
    assert find_newest_checkpoint(tmp_path) == path


def test_a_checkpoint_of_other_shapes_is_refused_not_broadcast(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, optimizer = build()
    path = save(tmp_path, 1, model, optimizer)
    weights = load_file(path / "trainable.safetensors")
    save_file({**weights, "1.bias": torch.zeros(1)}, path / "trainable.safetensors")
    with pytest.raises(DitLoraError, match="do not match this model"):
        load(path, model, optimizer)


def test_a_key_that_the_checkpoint_lacks_is_a_difference(tmp_path: Path) -> None:
    model, optimizer = build()
    path = save(tmp_path, 1, model, optimizer)
    with pytest.raises(DitLoraError, match=r"train\.steps: None in the checkpoint, 9 in the recipe"):
        load_checkpoint(path, {**IDENTITY, "train.steps": 9})


def test_a_key_that_the_recipe_lacks_is_a_difference(tmp_path: Path) -> None:
    model, optimizer = build()
    path = save(tmp_path, 1, model, optimizer)
    fewer = {key: value for key, value in IDENTITY.items() if key != "lora.rank"}
    with pytest.raises(DitLoraError, match=r"lora\.rank: 4 in the checkpoint, None in the recipe"):
        load_checkpoint(path, fewer)


def test_another_recipes_checkpoint_is_refused_with_every_difference(tmp_path: Path) -> None:
    model, optimizer = build()
    path = save(tmp_path, 1, model, optimizer)
    other_identity = {**IDENTITY, "lora.rank": 8, "optim.betas": (0.9, 0.999)}
    with pytest.raises(DitLoraError) as error:
        load_checkpoint(path, other_identity)
    message = str(error.value)
    assert "belongs to another recipe" in message
    assert "lora.rank: 4 in the checkpoint, 8 in the recipe" in message
    assert "optim.betas" in message
    assert "lora.targets" not in message


def test_more_steps_after_the_end_of_a_schedule_are_told_how(tmp_path: Path) -> None:
    model, optimizer = build()
    ends = {**IDENTITY, "train.mode": "lora", "model.family": "cogvideox", "train.steps": 4}
    path = save_checkpoint(tmp_path, 1, state_of(model, optimizer), ends, keep=2)
    with pytest.raises(DitLoraError, match=f"start a new run with lora.init={tmp_path}"):
        load_checkpoint(path, {**ends, "train.steps": 8})


def test_none_auto_and_a_missing_path(tmp_path: Path) -> None:
    assert find_checkpoint("none", tmp_path) is None
    assert find_checkpoint("auto", tmp_path) is None
    with pytest.raises(DitLoraError, match=r"train\.resume: nowhere does not exist; .* has none"):
        find_checkpoint("nowhere", tmp_path)
    file, empty_folder = tmp_path / "file", tmp_path / "empty"
    file.touch()
    empty_folder.mkdir()
    for other in (file, empty_folder):
        with pytest.raises(DitLoraError, match=f"{other.name} is not the folder of a checkpoint; .* has none"):
            find_checkpoint(str(other), tmp_path)
    path = save(tmp_path, 5, *build())
    assert find_checkpoint("auto", tmp_path) == find_checkpoint(str(path), tmp_path) == path


@pytest.mark.parametrize("expert", ["", "high_noise"])
def test_a_mistyped_folder_is_named_where_a_run_would_begin_anew(tmp_path: Path, expert: str) -> None:
    save(tmp_path / "kitten_2" / expert, 5, *build())
    (tmp_path / "kittens").mkdir()
    warning = describe_similar_run("auto", tmp_path / "kiten_2")
    assert warning is not None
    assert f"to continue it, set run.dir={tmp_path / 'kitten_2'}" in warning
    # A number is meant; so is another name, a folder that exists, and a run that is not to be continued.
    for name in ("kitten_3", "puppy", "kittens", "kitten_2"):
        assert describe_similar_run("auto", tmp_path / name) is None
    assert describe_similar_run("none", tmp_path / "kiten_2") is None
    assert describe_similar_run("auto", tmp_path / "new" / "kiten_2") is None


def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, write = [], files._write_synced

    def note(path: Path, data: Any) -> None:
        order.append(path.name)
        write(path, data)

    monkeypatch.setattr(files, "_write_synced", note)
    path = save(tmp_path, 1, *build())
    assert order[-1] == "manifest.json"
    digests = json.loads((path / "manifest.json").read_text())["sha256"]
    assert set(digests) == set(order[:-1])


def test_what_recovery_changed_of_the_run_travels_with_the_checkpoint(tmp_path: Path) -> None:
    guard = {"state": {"lr_scale": 0.5, "switched_off": ["attention:flash"]}, "start_peak": 0.25}
    topology = {"processes": 4, "device": "cpu"}
    path = save_checkpoint(
        tmp_path,
        2,
        state_of(*build()),
        IDENTITY,
        keep=1,
        guard_state=guard,
        launch_topology=topology,
    )
    loaded = load_checkpoint(path, IDENTITY)
    assert (loaded.step, loaded.guard_state, loaded.launch_topology) == (2, guard, topology)


def test_dropped_state_starts_as_on_the_first_step(tmp_path: Path) -> None:
    """Going back to before AdamW's first step: what it made since must not stay."""
    model, optimizer = build()
    train(model, optimizer, 0, 2)
    names = list(optimizer_state(optimizer))
    drop_optimizer_state(optimizer, [name for name in names if "/1.bias/" in name])
    assert list(optimizer_state(optimizer)) == [name for name in names if "/1.weight/" in name]
    drop_optimizer_state(optimizer, names)
    assert not optimizer.state
    fresh, first_state = build()
    fresh.load_state_dict(model.state_dict())
    train(model, optimizer, 2, 4)
    train(fresh, first_state, 2, 4)
    assert torch.equal(model[1].weight, fresh[1].weight)


def test_checkpoints_of_another_trajectory_are_removed_and_named(tmp_path: Path) -> None:
    model, optimizer = build()
    paths = [save(tmp_path, step, model, optimizer) for step in (2, 4, 6, 10)]
    assert sorted(remove_checkpoints_after(tmp_path, 4)) == paths[2:]
    assert find_newest_checkpoint(tmp_path) == paths[1]
    assert [path.exists() for path in paths] == [True, True, False, False]
    assert remove_checkpoints_after(tmp_path, 4) == []
