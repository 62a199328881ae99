"""The gate: no loss and no gradient that is not finite reaches a weight, on any rank.

Order in a step: losses -> backward -> pre-clip gradients -> clip -> optimizer. The flag is agreed over all
ranks before anyone acts on it, so either every rank goes on or every rank stops at the same point.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from dit_lora.errors import DitLoraError, listed


class NonFiniteError(DitLoraError):
    """The guard stopped the run before a value that is not finite could touch a weight."""

    exit_code = 3
    collective = True

    def __init__(self, message: str, event: dict[str, Any]) -> None:
        super().__init__(message)
        self.event = event
        """The line for events.jsonl."""

    @property
    def data_at_fault(self) -> bool:
        """Whether reading the cache had found the sample bad; else its numbers went wrong on the way."""
        return bool(self.event["verdict"]["data_at_fault"])


@dataclass(frozen=True)
class Gate:
    """Checks that are collective: every rank must call them at the same point of the same step."""

    accelerator: Accelerator

    def check_losses(
        self,
        losses: torch.Tensor,
        sample_ids: Sequence[str],
        faults: Mapping[str, str],
        *,
        step: int,
        micro_step: int,
    ) -> None:
        """Raise on every rank if any rank's per-sample losses (B,) are not finite or its data is bad.

        `faults` says what reading the cache found wrong, by sample id. Comes before backward: DeepSpeed's
        backward also steps the optimizer.
        """
        bad = ~torch.isfinite(losses.detach())
        flag = bad.any() | bool(faults)
        if not self._any_rank(flag):
            return
        values = losses.detach().tolist()
        offenders = [
            {
                "sample": sample,
                "rank": self.accelerator.process_index,
                "reason": faults.get(sample) or f"its loss is {value}",
                "data": sample in faults,
            }
            for sample, value, is_bad in zip(sample_ids, values, bad.tolist(), strict=True)
            if is_bad or sample in faults
        ]
        self._stop("loss", gather_object(offenders), step=step, micro_step=micro_step)

    def check_gradients(
        self, norms: Mapping[str, torch.Tensor], sample_ids: Sequence[str], *, step: int
    ) -> None:
        """Raise on every rank if any parameter group's pre-clip gradient norm is not finite.

        A norm is finite only if every element is. Comes before clipping, which multiplies every gradient
        by the norm's inverse and so spreads one NaN to all of them.
        """
        flag = ~torch.isfinite(torch.stack(list(norms.values()))).all()
        if not self._any_rank(flag):
            return
        groups = ", ".join(name for name, norm in norms.items() if not torch.isfinite(norm))
        rank = self.accelerator.process_index
        reason = f"in the step whose {groups} gradient is not finite"
        offenders = [
            {"sample": sample, "rank": rank, "reason": reason, "data": False}
            for sample in sample_ids
            if groups
        ]
        self._stop("gradient", gather_object(offenders), step=step, micro_step=None)

    def _any_rank(self, flag: torch.Tensor) -> bool:
        total = self.accelerator.reduce(flag.to(torch.int32), reduction="sum")
        return bool(total.item())

    def _stop(self, kind: str, offenders: list[dict], *, step: int, micro_step: int | None) -> None:
        message = listed(
            f"step {step}: {kind} is not finite; the weights are those of step {step - 1}",
            [f"{o['sample']} (rank {o['rank']}): {o['reason']}" for o in offenders],
        )
        event = {
            "step": step,
            "micro_step": micro_step,
            "rank": offenders[0]["rank"],
            "kind": f"non_finite_{kind}",
            "sample_ids": [o["sample"] for o in offenders],
            "verdict": {
                "data_at_fault": any(o["data"] for o in offenders),
                "offenders": offenders,
            },
            "action": "stop",
        }
        raise NonFiniteError(message, event)
