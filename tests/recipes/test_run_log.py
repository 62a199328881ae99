"""What a normal run prints outside of a terminal: a short log, written as it happens, that ends with commands."""

from collections.abc import Callable
from pathlib import Path

import pytest
from runs import require_short_log
from smoke_recipes import RUNS, smoke_args

from dit_lora.config.load import load_recipe
from dit_lora.families import get_family

OPTIONS = ["train.steps=8", "train.save_every=4", "validation.every=4", "validation.eval_draws=1"]


def test_the_log_of_a_normal_run(
    lora_main: Callable[[list[str]], None], smoke: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    prompts = ["validation.prompts=[a red circle]", "validation.inference_steps=2"]
    lora_main([*smoke, *OPTIONS, *prompts, f"run.dir={run}"])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\r" not in captured.err
    lines = require_short_log(captured.err, run)
    assert "triton" not in captured.err.lower()
    assert [line.partition(":")[0] for line in lines[:2]] == ["1 process on cpu, float32", "lora"]
    told = [line.partition(" 0.")[0].partition(" 1.")[0] for line in lines if line.startswith("step ")]
    # A checkpoint is written in another thread, so its line may come after the next loss.
    assert sorted(told) == [
        *(f"step {step}: eval loss" for step in (0, 4)),
        "step 4: saved runs/demo/checkpoints/step_000004",
        *(f"step {step}: eval loss" for step in (8,)),
    ]
    assert "% since step 0)" in next(line for line in lines if line.startswith("step 8: eval loss"))
    assert [line.partition(":")[0] for line in lines[-6:-3]] == ["adapter", "verified", "time"]
    assert lines[-3:] == [
        "next: dit-lora sample runs/demo --prompt '...'",
        "      dit-lora report runs/demo --serve  # or open report.html",
        "      dit-lora push runs/demo OWNER/NAME",
    ]


@pytest.mark.parametrize("name", RUNS)
def test_notes_on_a_checkpoint_leave_the_log_short(
    name: str,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines of the log that the test above does not see."""
    RUNS[name].prepare(monkeypatch)
    args = smoke_args(name, tiny_checkpoints, shape_clips, tmp_path)
    recipe = load_recipe(args[0], args[1:])
    notes = get_family(recipe.model.family).open(recipe.model, recipe).info.recipe_notes(recipe)
    # A warning about the checkpoint, which a normal run does not have.
    notes = [note for note in notes if not note.startswith("distilled: ")]
    assert len(notes) <= 2
    assert max(map(len, notes), default=0) <= 80
