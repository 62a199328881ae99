"""A healthy run's result is verified at any training noise levels, and `dit-lora verify` passes on its file again."""

from collections.abc import Callable
from pathlib import Path

import pytest
from smoke_recipes import RUNS, smoke_args
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.config.load import load_recipe
from dit_lora.families import get_family
from dit_lora.numerics.objectives import FlowMatching

Main = Callable[[list[str]], None]
LEVELS = (
    ("shift=9",),
    ("mean=1.5", "std=0.3"),
    ("density=mode", "mode_scale=-0.5"),
    ("t_min=0.2", "t_max=0.4"),
)
"""`train.timesteps` far from every family's own; the last is not in the range of each of Wan 2.2's experts."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", RUNS)
def test_a_run_at_other_noise_levels_is_verified(
    name: str,
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    RUNS[name].prepare(monkeypatch)
    nothing_shown = [f"validation.{field}=[]" for field in ("prompts", "references", *RUNS[name].pictures)]
    args = [*smoke_args(name, tiny_checkpoints, shape_clips, tmp_path), *nothing_shown]
    recipe = load_recipe(args[0], args[1:])
    checkpoint = get_family(recipe.model.family).open(recipe.model)
    if recipe.train.mode == "full" or not isinstance(checkpoint.denoiser.objective, FlowMatching):
        pytest.skip("trains no adapter, or is not trained by flow matching")
    for number, levels in enumerate(LEVELS[: 3 if name.startswith("wan_2.2") else None]):
        run = tmp_path / f"run_{number}"
        options = [f"train.timesteps.{level}" for level in levels]
        lora_main([*args, *options, f"run.dir={run}", "train.steps=2"])
        result = CliRunner().invoke(app, ["verify", str(run)])
        assert result.exit_code == 0, result.output
        assert "every check passed" in result.output
        adapter_args = ["verify", str(run / "adapter"), "--model", recipe.model.path]
        result = CliRunner().invoke(app, adapter_args)
        assert result.exit_code == 0, result.output
        assert "as trained" in result.output
