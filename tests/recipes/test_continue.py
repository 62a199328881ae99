"""Training that goes on from a LoRA's file: it starts where that ended, and resumes bit for bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import adapter, lines, same_adapter, trajectory
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, read_run_metadata
from dit_lora.commands.verify import verify_adapter
from dit_lora.config.load import load_recipe
from dit_lora.errors import DitLoraError
from dit_lora.export.export import ExportRequest, export
from dit_lora.families import get_family

Main = Callable[[list[str]], None]


@pytest.fixture
def first(lora_main: Main, smoke: list[str], tmp_path: Path) -> Path:
    """A run of rank 3 with alpha 5, on two of attention's layers."""
    run = tmp_path / "first"
    options = ["lora.rank=3", "lora.alpha=5", "lora.targets=[to_q, to_out.0]"]
    lora_main([*smoke, *options, "train.steps=4", "validation.eval_draws=2", f"run.dir={run}"])
    return run


@pytest.fixture
def onward(smoke: list[str], tmp_path: Path) -> list[str]:
    """The recipe without a rank of its own: its file's YAML has one."""
    recipe = tmp_path / "onward.yaml"
    recipe_lines = Path(smoke[0]).read_text().splitlines()
    recipe.write_text("\n".join(line for line in recipe_lines if "rank:" not in line and "alpha:" not in line))
    return [str(recipe), *smoke[1:]]


def relabelled(file: Path, out: Path, **changes: Any) -> Path:
    """Write the file with another provenance, and all else of its header."""
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    metadata = {**read_run_metadata(file), **changes}
    save_file(load_file(file), out, metadata={**header, "dit_lora": json.dumps(metadata)})
    return out


def eval_losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in lines(run, "eval_loss.jsonl")}


def test_a_run_starts_where_the_file_ended(lora_main: Main, onward: list[str], first: Path, tmp_path: Path) -> None:
    run = tmp_path / "second"
    args = [*onward, f"lora.init={first}", "train.steps=3", f"run.dir={run}"]
    lora_main([*args, "validation.eval_draws=2"])
    # What the base's loss was before the first step is the trained adapter's.
    assert eval_losses(run)[0] == eval_losses(first)[4]
    metadata = read_run_metadata(run / "adapter" / ADAPTER_FILE)
    assert (metadata["rank"], metadata["alpha"]) == (3, 5)
    assert metadata["continued"] == {"name": "first", "sha256": metadata["continued"]["sha256"]}
    assert str(tmp_path) not in json.dumps(metadata)
    before, after = adapter(first), adapter(run)
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    moved = max((before[name] - after[name]).abs().max() for name in before)
    assert moved < 0.01  # three steps at 1e-3
    verified = json.loads((run / "verification.json").read_text())
    assert verified["passed"]
    assert "rank 3, alpha 5, as in the header and metadata" in verified["checks"]["scale"]["words"]
    # The recipe that the run wrote is one that it takes.
    assert load_recipe(run / "config.yaml").lora.init == str(first)
    lora_main([str(run / "config.yaml"), f"run.dir={tmp_path / 'again'}"])
    assert same_adapter(tmp_path / "again", run)


@pytest.mark.parametrize("form", ["comfyui", "kohya", "peft", "diffusers"])
def test_whichever_form_the_file_has_training_is_the_same(
    lora_main: Main, onward: list[str], first: Path, tmp_path: Path, form: Any
) -> None:
    lora_main([*onward, f"lora.init={first}", "train.steps=2", f"run.dir={tmp_path / 'plain'}"])
    exported = export(ExportRequest((first,), form, tmp_path / "out"))
    lora_main([*onward, f"lora.init={exported}", "train.steps=2", f"run.dir={tmp_path / 'other'}"])
    assert same_adapter(tmp_path / "other", tmp_path / "plain")


def test_resuming_is_bit_for_bit_and_knows_the_file_by_what_it_holds(
    lora_main: Main, onward: list[str], first: Path, tmp_path: Path
) -> None:
    common = [*onward, "lora.dropout=0.2", "train.ema=0.5", "data.caption_dropout=0.3"]
    lora_main([*common, f"lora.init={first}", "train.steps=6", f"run.dir={tmp_path / 'whole'}"])
    parts = [*common, f"run.dir={tmp_path / 'parts'}"]
    lora_main([*parts, f"lora.init={first}", "train.steps=3"])
    file = tmp_path / "moved.safetensors"
    shutil.copy(first / "adapter" / ADAPTER_FILE, file)
    # Elsewhere, and with a rank that says what the file says.
    lora_main([*parts, f"lora.init={file}", "lora.rank=3", "train.steps=6", "train.resume=auto"])
    assert trajectory(tmp_path / "parts") == trajectory(tmp_path / "whole")
    assert same_adapter(tmp_path / "parts", tmp_path / "whole")
    tensors = load_file(file)
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, file)
    with pytest.raises(DitLoraError, match=r"belongs to another recipe(.|\n)*lora\.init: "):
        lora_main([*parts, f"lora.init={file}", "train.steps=7", "train.resume=auto"])


def test_other_weights_of_the_same_architecture_are_told_of(
    lora_main: Main,
    onward: list[str],
    first: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other_base = tmp_path / "another-base"
    get_family("cogvideox").build_tiny_checkpoint("cogvideox-5b", other_base, 9)
    message = "lora.init: first was trained on cogvideox-5b, with other weights than this another-base"
    args = [*onward, f"lora.init={first}", "train.steps=1"]
    lora_main([*args, f"run.dir={tmp_path / 'same'}"])
    assert "with other weights" not in capsys.readouterr().err
    lora_main([*args, f"model.path={other_base}", f"run.dir={tmp_path / 'other'}"])
    assert message in capsys.readouterr().err


def test_a_run_that_changes_nothing_of_the_file_is_refused(
    lora_main: Main, onward: list[str], first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    with pytest.raises(DitLoraError, match=r"every matrix is still that of .*first") as error:
        lora_main([*onward, f"lora.init={first}", "train.steps=2", f"run.dir={tmp_path / 'run'}"])
    assert error.value.exit_code == 1
    assert not (tmp_path / "run" / "adapter").exists()


def test_layers_of_several_ranks_are_trained_saved_and_verified(
    lora_main: Main, onward: list[str], first: Path, tmp_path: Path
) -> None:
    exported = export(ExportRequest((first,), "kohya", tmp_path / "out"))
    tensors = load_file(exported / "out.safetensors")
    key = "lora_unet__transformer_blocks_1_attn1_to_q"
    tensors[f"{key}.lora_down.weight"] = tensors[f"{key}.lora_down.weight"][:2].clone()
    tensors[f"{key}.lora_up.weight"] = tensors[f"{key}.lora_up.weight"][:, :2].clone()
    tensors[f"{key}.alpha"] = torch.tensor(1.5)
    save_file(tensors, tmp_path / "uneven.safetensors")
    run = tmp_path / "run"
    lora_main([*onward, f"lora.init={tmp_path / 'uneven.safetensors'}", "train.steps=2", f"run.dir={run}"])
    ranks = {name: len(t) for name, t in adapter(run).items() if "lora_A" in name}
    uneven = "transformer.transformer_blocks.1.attn1.to_q.lora_A.weight"
    assert {name for name, rank in ranks.items() if rank != 3} == {uneven}
    metadata = read_run_metadata(run / "adapter" / ADAPTER_FILE)
    assert (metadata["rank"], metadata["alpha"]) == (3, 5)
    assert list(metadata["rank_pattern"].values()) == [2]
    assert list(metadata["alpha_pattern"].values()) == [1.5]
    verified = json.loads((run / "verification.json").read_text())
    assert verified["passed"]
    message = verified["checks"]["scale"]["words"]
    assert "rank 2, alpha 1.5; rank 3, alpha 5" in message
    # A loader that takes the usual rank and alpha for every layer would not pass.
    file = run / "adapter" / ADAPTER_FILE
    flat = relabelled(file, file, rank_pattern={}, alpha_pattern={})
    assert "0.75, and 1.66667 was trained" in str(verify_adapter(flat, model_of(run)).failures)


def model_of(run: Path) -> str:
    return load_recipe(run / "config.yaml").model.path


@pytest.fixture
def refused(lora_main: Main, onward: list[str], tmp_path: Path) -> Callable[..., str]:
    def run(*overrides: str) -> str:
        with pytest.raises(DitLoraError) as error:
            lora_main([*onward, f"run.dir={tmp_path / 'run'}", *overrides])
        assert error.value.exit_code == 2
        assert not (tmp_path / "run").exists()
        return str(error.value)

    return run


@pytest.mark.usefixtures("nothing_encoded")
def test_a_start_that_is_not_there_or_no_adapter(refused: Callable[..., str], tmp_path: Path) -> None:
    """In one line, and before anything is encoded."""
    message = refused("lora.init=kaimming")
    assert message == "lora.init: kaimming does not exist; give kaiming, gaussian, or a LoRA to continue from"
    assert "and it cannot be downloaded" in refused("lora.init=nobody/nothing-here")
    assert "and it cannot be downloaded" in refused("lora.init=nobody/many/one.safetensors")
    (tmp_path / "empty").mkdir()
    assert "no LoRA in" in refused(f"lora.init={tmp_path / 'empty'}")
    for name in ("one", "two"):
        save_file({}, tmp_path / "empty" / f"{name}.safetensors")
    message = refused(f"lora.init={tmp_path / 'empty'}")
    assert message.endswith("has several files; name one of them\n  - one.safetensors\n  - two.safetensors")
    (tmp_path / "old.pt").write_bytes(b"x")
    assert "is not a .safetensors file; convert it first" in refused(f"lora.init={tmp_path / 'old.pt'}")
    (tmp_path / "torn.safetensors").write_bytes(b"nonsense")
    message = refused(f"lora.init={tmp_path / 'torn.safetensors'}")
    assert f"cannot read {tmp_path / 'torn.safetensors'}: " in message
    assert not (tmp_path / "cache").exists()


def test_an_adapter_of_another_model_or_with_more_than_a_lora(
    refused: Callable[..., str], first: Path, tmp_path: Path
) -> None:
    file = first / "adapter" / ADAPTER_FILE
    sana_file = relabelled(file, tmp_path / "other.safetensors", family="sana")
    renamed = {f"transformer.x{number}.{name}": t for number, (name, t) in enumerate(load_file(sana_file).items())}
    header = {"dit_lora": json.dumps(read_run_metadata(sana_file))}
    save_file(renamed, sana_file, metadata=header)  # of which nothing fits
    message = refused(f"lora.init={sana_file}")
    assert message == f"lora.init: {sana_file} is an adapter of family sana, not of cogvideox"
    expert = relabelled(file, tmp_path / "expert.safetensors", part="transformer_2")
    message = refused(f"lora.init={expert}")
    assert message == f"lora.init: {expert} is an adapter of part transformer_2, not of transformer"
    tensors = load_file(file)
    moved = {key.replace("_blocks.1.", "_blocks.7."): value for key, value in tensors.items()}
    save_file(moved, tmp_path / "moved.safetensors")
    message = refused(f"lora.init={tmp_path / 'moved.safetensors'}")
    assert "2 of its layers are not in the model" in message
    assert "transformer_blocks.7.attn1.to_out.0: not in the model" in message
    message = refused(f"lora.init={first}", "lora.rank=8")
    assert "lora.rank: 8 is given, and 3 is in pytorch_lora_weights.safetensors" in message
    save_file({"x": torch.ones(1)}, first / "adapter" / "base_weights.safetensors")
    assert "also has trained base weights" in refused(f"lora.init={first}")
