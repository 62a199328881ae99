"""Resuming on another topology prints one line; a step with other samples is refused with its remedy."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from dit_lora.config.load import parse_recipe
from dit_lora.errors import DitLoraError
from dit_lora.numerics.precision import Precision
from dit_lora.training.checkpoints.files import (
    SAMPLES_PER_STEP_KEY,
    VALIDATION_CONVERSATIONS_KEY,
    VALIDATION_DATA_KEY,
    SavedState,
    advise_on_samples_per_step,
    describe_launch_topology,
    describe_topology_change,
    has_dropout,
    load_checkpoint,
    save_checkpoint,
)
from dit_lora.training.session.session import Session

PLACE = {
    "processes": 4,
    "data_ranks": 4,
    "train.batch_size": 2,
    "train.accumulate": 1,
    "sharding": "none",
    "device": "NVIDIA H100 80GB HBM3",
    "torch": "2.13.0",
}


def test_the_same_place_is_not_worth_a_word() -> None:
    assert describe_topology_change(PLACE, dict(PLACE), uses_dropout=True) is None
    assert describe_topology_change({}, PLACE, uses_dropout=True) is None  # a checkpoint that does not say


@pytest.mark.parametrize(
    ("now", "dropout", "words"),
    [
        (
            {"processes": 2, "data_ranks": 2, "train.accumulate": 2},
            True,
            "processes x accumulate x batch_size were 4 x 1 x 2, now 2 x 2 x 2: the same samples in each "
            "step, summed in another order; dropout masks differ; equal within rounding",
        ),
        (
            {"processes": 8, "data_ranks": 8, "train.batch_size": 1},
            False,
            "were 4 x 1 x 2, now 8 x 1 x 1: the same samples in each step, summed in another order; equal",
        ),
        ({"sharding": "zero2"}, True, "sharding was none, now zero2: summed in another order; equal"),
        (
            {"device": "cpu", "torch": "2.14.0"},
            False,
            "device and torch was NVIDIA H100 80GB HBM3 2.13.0, now cpu 2.14.0: other kernels",
        ),
    ],
)
def test_what_differs_and_what_it_means(now: dict[str, Any], dropout: bool, words: str) -> None:
    line = describe_topology_change(PLACE, PLACE | now, uses_dropout=dropout)
    assert line is not None
    assert words in line
    assert "\n" not in line
    assert line.endswith("not bit for bit")


@pytest.mark.parametrize(
    ("samples", "processes", "batch", "remedy"),
    [
        (8, 2, 2, "on 2 processes, train.accumulate=2 restores it"),
        (8, 2, 3, "on 2 processes, train.batch_size=2 train.accumulate=2 restores it"),
        (7, 1, 4, "on 1 process, train.batch_size=1 train.accumulate=7 restores it"),
        (8, 3, 1, "3 processes cannot share 8 samples: launch 2"),
    ],
)
def test_the_value_that_restores_the_samples_of_a_step(samples: int, processes: int, batch: int, remedy: str) -> None:
    topology = PLACE | {"data_ranks": processes, "train.batch_size": batch}
    assert advise_on_samples_per_step(SAMPLES_PER_STEP_KEY, samples, topology) == f"; {remedy}"
    assert advise_on_samples_per_step("lora.rank", samples, topology) == ""


def test_a_checkpoint_of_other_samples_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = save_checkpoint(
        tmp_path,
        1,
        SavedState({"w": nn.Linear(3, 2).weight.detach()}, {}),
        {SAMPLES_PER_STEP_KEY: 8},
        keep=1,
    )
    topology = PLACE | {"data_ranks": 1}
    with pytest.raises(DitLoraError) as error:
        load_checkpoint(path, {SAMPLES_PER_STEP_KEY: 2}, topology)
    assert "8 in the checkpoint, 2 in the recipe; on 1 process, train.accumulate=4 restores it" in str(error.value)


@pytest.mark.parametrize("key", [VALIDATION_DATA_KEY, VALIDATION_CONVERSATIONS_KEY])
def test_validation_data_may_come_and_go_and_not_change(tmp_path: Path, key: str) -> None:
    """The run's losses after the change would be of other samples than those before."""
    weights = {"w": nn.Linear(3, 2).weight.detach()}
    plain = save_checkpoint(tmp_path / "plain", 1, SavedState(weights, {}), {"seed": 1}, keep=1)
    validated = {"seed": 1, key: "a1"}
    path = save_checkpoint(tmp_path / "validated", 1, SavedState(weights, {}), validated, keep=1)
    for checkpoint, now in ((plain, validated), (path, {"seed": 1}), (path, validated)):
        load_checkpoint(checkpoint, now)
    message = rf"belongs to another recipe(.|\n)*{re.escape(key)}: 'a1' in the checkpoint"
    with pytest.raises(DitLoraError, match=message):
        load_checkpoint(path, validated | {key: "b2"})


def test_where_this_process_is(recipe_values: dict[str, Any]) -> None:
    recipe_values["train"] |= {"batch_size": 3, "accumulate": 5}
    recipe = parse_recipe(recipe_values, "recipe")
    session = Session(recipe, Accelerator(cpu=True), Precision(torch.float32, ""))
    topology = describe_launch_topology(session)
    assert topology.pop("torch") == torch.__version__
    assert topology == {
        "processes": 1,
        "data_ranks": 1,
        "train.batch_size": 3,
        "train.accumulate": 5,
        "sharding": "none",
        "device": "cpu",
    }
    assert describe_launch_topology(replace(session, zero_stage=2))["sharding"] == "zero2"


def test_dropout_of_zero_draws_nothing() -> None:
    assert has_dropout(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1)))
    assert not has_dropout(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.0)))
