"""Micro-batches and diagnosis contexts of a test, which call its functions."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.objectives import LossOutput

NamedTensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True, eq=False, kw_only=True)
class FakeBatch(MicroBatch):
    """Calls functions; it cannot be drawn again."""

    run: Callable[[], Any]
    select: Callable[[int], MicroBatch]

    def forward(self) -> LossOutput:
        return self.run()

    def select_sample(self, index: int) -> MicroBatch:
        return self.select(index)


@dataclass(frozen=True, eq=False, kw_only=True)
class FakeDrawnBatch(FakeBatch):
    """Calls functions; it can be drawn again and moved."""

    can_redraw: ClassVar[bool] = True
    redrawn: Callable[[int], MicroBatch]
    moved: Callable[[MicroBatch, bool], MicroBatch]

    def redraw_noise(self, number: int) -> MicroBatch:
        return self.redrawn(number)

    def move_to_run_position(self, position: MicroBatch, *, copies_seeds: bool = False) -> MicroBatch:
        return self.moved(position, copies_seeds)


def fake_batch(
    ids: tuple[str, ...],
    step: int,
    micro_step: int,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    run: Callable[[], Any],
    select: Callable[[int], Any],
    **facts: Any,
) -> MicroBatch:
    kind: Any = FakeDrawnBatch if "redrawn" in facts else FakeBatch
    position = {"step": step, "micro_step": micro_step, "rank": rank}
    return kind(ids=ids, tensors=tensors, run=run, select=select, **position, **facts)


@dataclass(frozen=True, kw_only=True)
class FakeContext(DiagnosisContext):
    """Asks functions."""

    state: NamedTensors = list
    peaks: Callable[[], Mapping[str, float]] = dict
    decay_share: Callable[[], float] = float
    other_sample: Callable[[MicroBatch, Collection[str]], MicroBatch | None] = lambda batch, excluded: None
    share: Callable[[MicroBatch | None, int], MicroBatch | None] = lambda batch, owner: batch

    def collect_optimizer_state(self) -> Mapping[str, torch.Tensor]:
        return dict(self.state())

    def compute_snapshot_peaks(self) -> Mapping[str, float]:
        return self.peaks()

    def compute_decay_share(self) -> float:
        return self.decay_share()

    def find_other_sample(self, micro_batch: MicroBatch, excluded_ids: Collection[str]) -> MicroBatch | None:
        return self.other_sample(micro_batch, excluded_ids)

    def share_micro_batch(self, local_batch: MicroBatch | None, owner: int) -> MicroBatch | None:
        return self.share(local_batch, owner)
