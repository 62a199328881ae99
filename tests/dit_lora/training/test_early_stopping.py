"""When a loss has stopped falling."""

from typing import Any

import pytest

from dit_lora.config.load import parse_recipe
from dit_lora.errors import DitLoraError
from dit_lora.training.early_stopping import find_best_step_if_stalled


@pytest.mark.parametrize(
    ("losses", "stop_after", "best"),
    [
        ({}, 1, None),
        ({0: 1.0}, 1, None),
        ({0: 1.0, 5: 0.9}, 1, None),
        ({0: 1.0, 5: 1.1}, 1, 0),
        # An equal loss is no better one.
        ({0: 1.0, 5: 1.0, 10: 1.0}, 2, 0),
        ({0: 1.0, 5: 0.5, 10: 0.6}, 2, None),
        # A new lowest loss starts the count again.
        ({0: 1.0, 5: 1.1, 10: 0.9, 15: 0.95}, 2, None),
        ({0: 1.0, 5: 1.1, 10: 0.9, 15: 0.95, 20: 0.91}, 2, 10),
        # A step that could not be measured does not count.
        ({0: 1.0, 5: 0.5, 20: 0.6}, 2, None),
    ],
)
def test_measurements_after_the_best_are_counted(losses: dict[int, float], stop_after: int, best: int | None) -> None:
    assert find_best_step_if_stalled(losses, stop_after) == best


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "stop_after counts validations during training: give validation.every"),
        ({"validation": {"every": 5, "eval_draws": 0}}, "stop_after needs an eval loss: validation.eval_draws is 0"),
        ({"validation": {"every": 5}, "chat": {}}, "stop_after needs an eval loss: give validation.conversations"),
    ],
)
def test_without_losses_to_compare_no_run_can_stop_early(sections: dict[str, Any], message: str) -> None:
    values = {
        "model": {"family": "cogvideox", "path": "model"},
        "data": {"path": "clips", "frames": 1, "height": 32, "width": 48},
        "train": {"steps": 10, "stop_after": 2},
        "run": {"dir": "runs/run"},
        **sections,
    }
    with pytest.raises(DitLoraError) as error:
        parse_recipe(values, "recipe")
    assert f"train.{message}" in str(error.value)
