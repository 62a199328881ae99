"""The benchmark of a step's overhead runs, and its three kinds of steps are timed as often."""

from pathlib import Path

import torch

from benchmarks.overhead import FAMILY, WATCHED_ROUNDS, measure
from dit_lora.config.recipe import ModelConfig


def test_every_kind_of_step_is_timed(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = str(tiny_checkpoints["cogvideox-2b"])
    checkpoint = FAMILY.open(ModelConfig(family="cogvideox", path=path))
    times = measure(checkpoint, tmp_path, WATCHED_ROUNDS, size=2)
    counts = [len(seconds) for seconds in (times.bare, times.unguarded, times.guarded, times.watched)]
    assert counts == [WATCHED_ROUNDS, WATCHED_ROUNDS, WATCHED_ROUNDS, 1]
    assert min(times.bare + times.unguarded + times.guarded + times.watched) > 0
