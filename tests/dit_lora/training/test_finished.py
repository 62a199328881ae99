"""A run is finished if its files say so and the recipe asks for no more."""

import json
from pathlib import Path
from typing import Any

import pytest

from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.training.checkpoints.files import checkpoint_path
from dit_lora.training.experts import is_run_finished
from dit_lora.training.finished import find_finished_step, is_finished

SMOKE = Path(__file__).parents[3] / "recipes" / "smoke" / "cogvideox.yaml"
LOSSES = {0: 0.5, 2: 0.3, 4: 0.4, 6: 0.35}


def recipe(run: Path, *overrides: str) -> Recipe:
    given = ["train.steps=6", "train.save_every=2", "train.resume=auto", "model.path=x", "data.path=x"]
    return load_recipe(SMOKE, [*given, f"run.dir={run}", *overrides])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The files of a run that ended after step 6."""
    write_run(tmp_path / "run")
    return tmp_path / "run"


def write_run(run: Path) -> None:
    run.mkdir(parents=True)
    (run / "status.json").write_text(json.dumps({"state": "finished"}))
    (run / "verification.json").write_text(json.dumps({"passed": True}))
    write_lines(run / "metrics.jsonl", [{"step": step} for step in range(1, 7)])
    write_lines(run / "eval_loss.jsonl", [{"step": step, "eval_loss": loss} for step, loss in LOSSES.items()])
    checkpoint = checkpoint_path(run, 6)
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"sha256": {}}))


def write_lines(path: Path, objects: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(values)}\n" for values in objects))


STOPS_EARLY = ("train.steps=20", "validation.every=2", "train.stop_after=2")


@pytest.mark.parametrize(
    ("overrides", "step"),
    [
        ((), 6),
        (("train.steps=20",), None),
        (STOPS_EARLY, 6),
        ((*STOPS_EARLY, "train.stop_after=3"), None),
        ((*STOPS_EARLY, "validation.data=0.2"), None),  # another loss, which was not measured
    ],
)
def test_the_last_step_is_the_recipes_or_the_one_that_stop_after_ends(
    run: Path, overrides: tuple[str, ...], step: int | None
) -> None:
    assert find_finished_step(recipe(run, *overrides)) == step
    assert is_run_finished(recipe(run, *overrides)) is (step is not None)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("status.json", {"state": "interrupted"}),
        ("verification.json", {"passed": False}),
        ("verification.json", {"passed": True, "files": {"adapter/deleted.safetensors": "00"}}),
        ("status.json", {"state": 7}),
        ("metrics.jsonl", {"step": 5}),
    ],
)
def test_what_did_not_end_well_is_not_finished(run: Path, name: str, content: dict[str, Any]) -> None:
    write_lines(run / name, [content])
    assert find_finished_step(recipe(run)) is None


def test_an_expert_that_was_stopped_early_is_not_trained_again(tmp_path: Path) -> None:
    """Its last checkpoint decides too, and the second expert keeps the pair unfinished."""
    pair = recipe(tmp_path / "run", *STOPS_EARLY, "train.steps=40", "model.part=both", "model.family=wan")
    first = recipe(tmp_path / "run" / "high_noise", *STOPS_EARLY)
    write_run(tmp_path / "run" / "high_noise")
    assert is_run_finished(first)
    assert not is_finished(pair)
    write_run(tmp_path / "run" / "low_noise")
    assert is_finished(pair)
    (checkpoint_path(tmp_path / "run" / "high_noise", 6) / "manifest.json").unlink()
    assert not is_run_finished(first)
