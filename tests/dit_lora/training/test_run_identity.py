"""What a resumed run must share with its checkpoint: everything that changes the trajectory."""

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator

from dit_lora.config.load import parse_recipe
from dit_lora.numerics.precision import Precision
from dit_lora.training.checkpoints.files import VALIDATION_CONVERSATIONS_KEY, VALIDATION_DATA_KEY
from dit_lora.training.prepare import build_trajectory_config
from dit_lora.training.session.session import Session
from dit_lora.training.task import Setup
from dit_lora.training.tasks.registry import get_task_of_family

VALUES: dict[str, Any] = {
    "model": {"family": "dit", "path": "x"},
    "data": {"path": "images", "height": 32, "width": 32},
    "optim": {"groups": {"adapter": {"lr": 1e-4}}},
    "train": {"steps": 10},
    "run": {"dir": "runs/a"},
}


def identity(validation_digest: str = "", **changes: Any) -> dict[str, Any]:
    values = copy.deepcopy(VALUES)
    for key, value in changes.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    ranks, precision = SimpleNamespace(num_processes=2), Precision(torch.float32, "test")
    session = Session(parse_recipe(values, "test"), cast(Accelerator, ranks), precision)
    data: Any = SimpleNamespace(transformer_digest="t", data_digest="d", validation_digest=validation_digest)
    task = get_task_of_family(session.recipe.model.family)
    nothing: Any = None
    return build_trajectory_config(Setup(session, task, nothing, data, nothing))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"data__flip": True}, "data.flip"),
        ({"data__caption_dropout": 0.1}, "data.caption_dropout"),
        ({"data__image_dropout": 0.1}, "data.image_dropout"),
        ({"train__seed": 1}, "train.seed"),
        ({"train__ema": 0.9}, "train.ema"),
        ({"train__vlb": False}, "train.vlb"),
        ({"train__accumulate": 3}, "train.batch_size x accumulate x processes"),
        (
            {"train__mode": "full", "optim__groups": {"backbone": {"lr": 1e-4}}},
            "train.mode",
        ),
        (
            {
                "train__mode": "full",
                "optim__groups": {"backbone": {"lr": 1e-4}},
                "model__from_scratch": {"num_layers": 2},
            },
            "model.from_scratch",
        ),
    ],
)
def test_what_changes_the_trajectory_is_named(change: dict[str, Any], key: str) -> None:
    before, after = identity(), identity(**change)
    assert key in before
    assert before[key] != after[key]


@pytest.mark.parametrize("change", [{"train__steps": 20}, {"train__keep": 9}, {"run__dir": "b"}])
def test_what_does_not_may_change(change: dict[str, Any]) -> None:
    assert identity() == identity(**change)


def test_validation_data_counts_where_there_is_any() -> None:
    assert identity("d1") == identity() | {VALIDATION_DATA_KEY: "d1"}
    chat = {"model__family": "chat", "validation__conversations": "held_out.json"}
    assert identity("d1", **chat) == identity(**chat) | {VALIDATION_CONVERSATIONS_KEY: "d1"}
