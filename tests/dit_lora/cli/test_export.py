"""`dit-lora export` on a run's folder: what a user types, and what a user gets to read."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from diffusers import CogVideoXPipeline
from safetensors.torch import load_file
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.errors import DitLoraError

FILE = "adapter/pytorch_lora_weights.safetensors"


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def run(
    lora_main: Callable[[list[str]], None],
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("exported")
    values: dict[str, Any] = {
        "model": {"family": "cogvideox", "path": str(tiny_checkpoints["cogvideox-2b"])},
        "data": {"path": str(shape_clips), "frames": 9, "height": 32, "width": 48, "fps": 8},
        "lora": {"rank": 4, "alpha": 8},
        "optim": {"groups": {"adapter": {"lr": 1e-3}}},
        "train": {"steps": 2, "checkpointing": "none"},
        "validation": {"eval_draws": 0},
        "guard": {"preflight": False},
        "run": {"dir": str(folder / "run")},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    lora_main([str(folder / "recipe.yaml"), "data.workers=0"])
    return folder / "run"


def test_a_run_is_exported_by_its_folder_its_adapter_or_its_file(run: Path, tmp_path: Path) -> None:
    """The base is the one of its recipe."""
    for number, target in enumerate((run, run / "adapter", run / FILE)):
        output_dir = tmp_path / str(number)
        output = invoke("export", target, "--to", "comfyui", "--out", output_dir)
        assert output.splitlines() == [
            "checked 8 layers: the written file gives the same update",
            str(output_dir),
        ]
        assert len(load_file(output_dir / f"{number}.safetensors")) == 3 * 8
    assert not list(tmp_path.glob(".*"))


def test_a_script_gets_the_adapter_in_diffusers_form_and_a_terminal_is_asked(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("export", run, "--out", tmp_path / "scripted")
    assert [path.name for path in (tmp_path / "scripted").iterdir()] == ["pytorch_lora_weights.safetensors"]
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("dit_lora.cli.export.sys", SimpleNamespace(stdin=terminal, stderr=terminal))
    arguments = ["export", str(run), "--out", str(tmp_path / "asked")]
    result = CliRunner().invoke(app, arguments, input="gguf\npeft\n", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "Format [diffusers/peft/comfyui/kohya/folded/merged] (diffusers):" in result.stderr
    assert (tmp_path / "asked" / "adapter_model.safetensors").is_file()


def test_merged_is_a_whole_pipeline(run: Path, tmp_path: Path) -> None:
    invoke("export", run, "--to", "merged", "--out", tmp_path / "merged")
    pipeline = CogVideoXPipeline.from_pretrained(tmp_path / "merged")
    base = yaml.safe_load((run / "config.yaml").read_text())["model"]["path"]
    reference = CogVideoXPipeline.from_pretrained(base)
    name = "transformer_blocks.0.attn1.to_q.weight"
    merged, old = (pipe.transformer.get_parameter(name) for pipe in (pipeline, reference))
    assert 0 < (merged - old).abs().max() < 0.1
    metadata_text = (tmp_path / "merged" / "dit_lora.json").read_text()
    assert str(tmp_path) not in metadata_text
    assert str(run.parent) not in metadata_text
    assert json.loads(metadata_text)["base_model"] == "cogvideox-2b"


def test_two_adapters_are_added_by_weight(run: Path, tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    weights = ("--weight", 0.7, "--weight", -0.2)
    invoke("export", run, run / FILE, *weights, "--to", "diffusers", "--out", output_dir)
    tensors = load_file(run / FILE)
    merged_tensors = load_file(output_dir / "pytorch_lora_weights.safetensors")
    name = "transformer.transformer_blocks.1.attn1.to_v.lora_{}.weight"
    expected = 0.5 * 8 / 4 * tensors[name.format("B")] @ tensors[name.format("A")]
    product = merged_tensors[name.format("B")] @ merged_tensors[name.format("A")]
    assert (product - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_what_cannot_be_exported_is_said_in_a_line(
    run: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    def refused(*arguments: object) -> str:
        with pytest.raises(DitLoraError) as error:
            invoke("export", *arguments)
        assert error.value.exit_code == 2
        return str(error.value)

    out_option = ("--out", tmp_path / "out")
    assert "already exists; choose another folder" in refused(run, "--out", run)
    assert "2 adapters and 1 weights; give --weight once" in refused(run, run, "--weight", 1, *out_option)
    assert "--weight must not be 0; got [0.0]" in refused(run, "--weight", 0, *out_option)
    assert "--weight must not be 0; got [nan]" in refused(run, "--weight", "nan", *out_option)
    assert "does not exist" in refused(tmp_path / "gone", *out_option)
    (tmp_path / "bare").mkdir()
    assert "no adapter in" in refused(tmp_path / "bare", *out_option)
    (tmp_path / "full" / "model").mkdir(parents=True)
    (tmp_path / "full" / "model" / "model_index.json").write_text("{}")
    assert "full/model is a whole pipeline, so there is nothing to export" in refused(tmp_path / "full", *out_option)
    assert "is a SanaPipeline checkpoint; family cogvideox" in refused(
        run, "--model", tiny_checkpoints["sana-600m"], *out_option
    )
    adapter_dir = tmp_path / "alone"
    adapter_dir.mkdir()
    (adapter_dir / "kitten.safetensors").write_bytes((run / FILE).read_bytes())
    assert "does not name its base model (trained on cogvideox-2b); give --model" in refused(
        adapter_dir / "kitten.safetensors", *out_option
    )
    unknown = CliRunner().invoke(app, ["export", str(run), "--to", "gguf", *map(str, out_option)])
    assert unknown.exit_code == 2
    assert "'gguf' is not one of" in unknown.output
    assert {path.name for path in tmp_path.iterdir()} == {"bare", "full", "alone"}


def test_a_name_of_its_own_is_taken_with_model_given(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "kitten.safetensors"
    file.write_bytes((run / FILE).read_bytes())
    base = yaml.safe_load((run / "config.yaml").read_text())["model"]["path"]
    invoke("export", file, "--to", "folded", "--model", base, "--out", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")
    stored_tensors = load_file(file)
    for name, tensor in stored_tensors.items():
        assert tensors[name].equal(2 * tensor if "lora_B" in name else tensor), name


def test_what_reads_pipelines_files_says_how_to_get_one_of_a_peft_folder(run: Path, tmp_path: Path) -> None:
    base = ("--model", yaml.safe_load((run / "config.yaml").read_text())["model"]["path"])
    invoke("export", run, "--to", "peft", "--out", tmp_path / "peft")
    export_command = f"dit-lora export {tmp_path / 'peft'} --to diffusers --out OUT"
    for verb in (("verify",), ("sample", "--prompt", "a")):
        with pytest.raises(DitLoraError, match=re.escape(export_command)):
            invoke(*verb, *base, tmp_path / "peft")
    output_dir = tmp_path / "diffusers"
    invoke(*export_command.split()[1:-1], output_dir, *base)
    assert "every check passed" in invoke("verify", output_dir, *base)
