"""Launching recipes: in this process, through `accelerate launch`, or on two ranks with `torchrun`."""

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from launching import ROOT, SCRIPT, launch_command, launch_environment

SMOKE = ROOT / "recipes" / "smoke" / "cogvideox.yaml"

Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def smoke(tiny_checkpoints: dict[str, Path], shape_clips: Path, tmp_path: Path) -> list[str]:
    """The smoke recipe and overrides that make it quick: no sampling, 32x48."""
    return [
        str(SMOKE),
        f"model.path={tiny_checkpoints['cogvideox-5b']}",
        f"data.path={shape_clips}",
        f"data.cache={tmp_path / 'cache'}",
        "data.height=32",
        "data.width=48",
        "validation.prompts=[]",
        "validation.held_out_draws=0",
    ]


@pytest.fixture(scope="session")
def lora_main() -> Callable[[list[str]], None]:
    """`main` of recipes/lora.py, to run a recipe in this process."""
    spec = importlib.util.spec_from_file_location("lora_recipe", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def main(args: list[str]) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
        module.main(args)

    return main


@pytest.fixture(scope="session")
def launch() -> Launch:
    """Run recipes/lora.py in processes of its own: `launch(args)`, `launch(args, ranks=2)`."""

    def run(args: list[str], ranks: int = 1) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            launch_command(args, ranks), env=launch_environment(), text=True, capture_output=True
        )

    return run
