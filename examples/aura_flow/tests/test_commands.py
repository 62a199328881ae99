"""The family and its recipes, as the commands of dit-lora find them; a step of training; export."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.config.load import load_recipe


def run_command(*arguments: str) -> str:
    """Standard output of `dit-lora` with these arguments, run in this process."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def import_script(path: Path) -> Any:
    """The training script that `dit-lora init` wrote, as a module."""
    spec = importlib.util.spec_from_file_location("lora_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_commands_find_train_and_export_the_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    records = json.loads(run_command("recipes", "--family", "aura_flow", "--json"))["recipes"]
    assert [(record["name"], record["default"]) for record in records] == [
        ("smoke/aura_flow", False),
        ("aura_flow/v0.3", True),
    ]
    run_command("init", "aura_flow", "by-family")
    assert load_recipe(tmp_path / "by-family" / "aura_flow_v0.3.yaml").model.family == "aura_flow"
    run_command("tiny", "aura-flow", "tiny/aura-flow")
    run_command("tiny", "shapes", "images", "--frames", "1", "--clips", "2")
    run_command("init", "smoke/aura_flow", "run")
    recipe = "run/smoke_aura_flow.yaml"
    assert json.loads(run_command("plan", recipe, "--json"))["training"]["trained"] > 0
    quick = ("train.steps=1", "validation.prompts=[]", "guard.preflight=false", "guard.parity_every=0")
    import_script(tmp_path / "run" / "lora.py").main([recipe, *quick])
    run_command("export", "runs/smoke-aura_flow", "--to", "comfyui", "--out", "comfyui")
    (file,) = Path("comfyui").glob("*.safetensors")
    names = load_file(file)
    # Eight layers of the joint block's attention and four of the single block's, with two factors each.
    assert len(names) == 24
    assert "transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight" in names
