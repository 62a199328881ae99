"""The checkpoints with the lowest eval loss stay, and best.json names them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dit_lora.config.load import parse_recipe
from dit_lora.errors import DitLoraError
from dit_lora.training import fit as fitting
from dit_lora.training.checkpoint_state import BEST_FILE, find_best_checkpoints
from dit_lora.training.checkpoints.files import list_checkpoints
from dit_lora.training.run import Run

Main = Callable[[list[str]], None]


def test_only_checkpoints_that_are_measured_count(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    losses = {
        0: 0.1,
        2: 0.5,
        3: 0.2,
        4: 0.4,
        8: 0.4,
    }  # of 0 and 3 there is no checkpoint, of 6 no loss
    lines = [json.dumps({"step": s, "eval_loss": loss}) for s, loss in losses.items()]
    (tmp_path / "eval_loss.jsonl").write_text("\n".join(lines) + "\n")
    assert [record["step"] for record in find_best_checkpoints(tmp_path, 2)] == [
        4,
        8,
    ]  # the earlier of equals
    assert find_best_checkpoints(tmp_path, 9)[-1] == {
        "checkpoint": "step_000002",
        "step": 2,
        "eval_loss": 0.5,
    }
    assert find_best_checkpoints(tmp_path, 0) == []


@pytest.mark.parametrize(
    ("train", "validation", "words"),
    [
        ({}, {}, "validation.every must divide train.save_every or be a multiple of it; got None"),
        ({"save_every": 6}, {"every": 4}, "multiple of it; got 4 and 6"),
        ({"save_every": 6}, {"every": 6, "eval_draws": 0}, "eval_draws is 0"),
    ],
)
def test_without_their_loss_there_is_no_best(
    recipe_values: dict[str, Any], train: dict[str, Any], validation: dict[str, Any], words: str
) -> None:
    recipe_values["train"] |= {"keep_best": 1, **train}
    recipe_values["validation"] |= validation
    with pytest.raises(DitLoraError, match=r"train\.keep_best needs") as error:
        parse_recipe(recipe_values, "recipe")
    assert words in str(error.value)


def test_a_run_keeps_its_best_through_a_stop_and_a_resume(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between a checkpoint and its eval loss, it measures that when it goes on."""
    losses = {0: 0.1, 2: 0.5, 4: 0.2, 6: 0.7, 8: 0.3}
    measured: list[int] = []

    def next_loss(_run: Any) -> float:
        measured.append(len(measured) * 2)
        return losses[measured[-1]]

    monkeypatch.setattr(
        "dit_lora.training.tasks.diffusion.task.DiffusionTask.compute_eval_loss",
        staticmethod(next_loss),
    )
    folder = tmp_path / "run"
    args = [
        *smoke,
        "train.steps=8",
        "train.save_every=2",
        "train.keep=1",
        "train.keep_best=2",
        "validation.every=2",
        "validation.eval_draws=1",
        f"run.dir={folder}",
    ]
    validate = fitting.validate

    def killed(run: Run, step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt
        validate(run, step)

    with monkeypatch.context() as patched:
        patched.setattr(fitting, "validate", killed)
        with pytest.raises(KeyboardInterrupt):
            lora_main(args)
    assert list(list_checkpoints(folder)) == [2, 4]
    lora_main([*args, "train.resume=auto"])
    assert measured == [0, 2, 4, 6, 8]
    assert list(list_checkpoints(folder)) == [4, 8]
    best = json.loads((folder / "checkpoints" / BEST_FILE).read_text())
    assert [(record["checkpoint"], record["eval_loss"]) for record in best] == [
        ("step_000004", 0.2),
        ("step_000008", 0.3),
    ]
