"""Compares gradients of a run with the slope of its loss: in the first step, and every `guard.gradient_every`."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dit_lora.guard.diagnosis import Event, make_observation_event
from dit_lora.guard.gradient_check.check import GradientReport, check_gradient
from dit_lora.guard.replay import MicroBatch
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.task import AnySetup


@dataclass(frozen=True)
class GradientWatch:
    """Checks gradients of a run's steps. Weights, gradients and random state are bitwise unchanged afterwards."""

    setup: AnySetup
    start_step: int

    @property
    def unsupported_reason(self) -> str | None:
        """Why this run's gradients cannot be checked; None if they can, or should not be."""
        if not self.setup.recipe.guard.gradient_every:
            return None
        num_processes = self.setup.accelerator.num_processes
        # The loss of all ranks, and weights or gradients that are sharded, need collective evaluations.
        if num_processes > 1 or type(self.setup.engine) is not Engine:
            return (
                f"gradients are not checked: guard.gradient_every supports one process, and there are {num_processes}"
            )
        return None

    def is_due(self, step: int) -> bool:
        """True if the gradient of this step is to be checked: the first one's, and every `guard.gradient_every`."""
        interval = self.setup.recipe.guard.gradient_every
        if not interval or self.unsupported_reason is not None:
            return False
        return step == self.start_step + 1 or step % interval == 0

    def check(self, step: int, micro_batches: Sequence[MicroBatch]) -> Event | None:
        """Check a step's gradient after accumulation and before clipping.

        Returns the event of a gradient that is wrong, or that cannot be judged; None if it agrees with the loss, or is
        not finite, which the step's gate handles.
        """
        began = time.perf_counter()
        groups = {group["name"]: group["param_names"] for group in self.setup.optimizer.param_groups}
        report = check_gradient(
            lambda: compute_loss_terms(micro_batches),
            {n: p for n, p in self.setup.transformer.named_parameters() if p.requires_grad},
            dtype=self.setup.dtype,
            groups=groups,
        )
        if report.result == "agrees" or not report.is_finite:
            return None
        return make_gradient_event(step, report, time.perf_counter() - began)


def compute_loss_terms(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Each sample's share of a step's loss, which is the mean over its micro-batches, (samples,)."""
    losses = [micro_batch.forward().losses for micro_batch in micro_batches]
    return torch.cat([values / (len(values) * len(losses)) for values in losses])


def make_gradient_event(step: int, report: GradientReport, seconds: float) -> Event:
    """Create the event of a gradient check, with its figures."""
    layer = report.location.layer if report.location else None
    event = make_observation_event(step, "gradient_check", report.message, module=layer)
    figures: dict[str, Any] = {"result": report.result, "evaluations": report.num_evaluations}
    if report.worst is not None:
        worst = report.worst
        # Infinite without a gradient, which JSON cannot hold.
        ratio, bound = (value if math.isfinite(value) else None for value in (worst.ratio, worst.bound))
        figures |= {"direction": worst.direction, "ratio": ratio, "bound": bound}
    return replace(event, seconds=seconds, facts={"gradient": figures})
