"""Runs and diagnoses the micro-batch of a bundle, after its model was rebuilt."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from dit_lora.errors import listed
from dit_lora.guard.bundle import Bundle
from dit_lora.guard.diagnose import diagnose
from dit_lora.guard.replay import MicroBatch, Outcome, run
from dit_lora.guard.state import has_run_away, run_away, weight_peak
from dit_lora.guard.suspects import Suspects
from dit_lora.guard.switches import (
    Switch,
    all_switches,
    choose_cudnn,
    find_switch,
    in_fp32,
    kept_attention,
)
from dit_lora.guard.verdict import Verdict
from dit_lora.numerics.dtensors import needs_all_ranks


@dataclass(frozen=True)
class Replayed:
    """The result of replaying a bundle."""

    outcome: Outcome
    verdict: Verdict | None
    """The diagnosis; None if the micro-batch was healthy."""
    ids: tuple[str, ...]
    """The samples, in the order of the outcome's losses."""
    recorded: dict[str, Any]
    """The event that the run recorded."""
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """JSON-compatible values."""
        return {
            "healthy": self.verdict is None,
            "verdict": self.verdict.record() if self.verdict else None,
            "recorded": self.recorded,
            "sample_ids": list(self.ids),
            "losses": [str(loss) for loss in self.outcome.losses],
            "timesteps": list(self.outcome.timesteps),
            "notes": list(self.notes),
        }

    def told(self) -> str:
        """Text for a terminal: both diagnoses, each sample's loss and timestep, the trail to the first bad value."""
        recorded_verdict = self.recorded["verdict"]
        lines = [
            f"recorded: step {self.recorded['step']}: {recorded_verdict['cause']}: {recorded_verdict['words']}"
        ]
        if self.verdict is None:
            lines.append("replayed: healthy; the event does not come back here")
        else:
            lines.append(f"replayed: {self.verdict.cause}: {self.verdict.words}")
        rows = zip(self.ids, self.outcome.losses, self.outcome.timesteps, strict=True)
        lines += [f"  {sample}: loss {loss:g} at timestep {t}" for sample, loss, t in rows]
        trail = self.verdict.evidence.get("trail", []) if self.verdict else []
        return "\n".join([*lines, *(f"  {step}" for step in trail), *self.notes])


def judged(
    bundle: Bundle,
    micro_batch: MicroBatch,
    model: nn.Module,
    *,
    fp32: bool,
    without: Sequence[str],
    limit: float | None,
    masked_attention: bool | None,
    notes: Sequence[str],
) -> Replayed:
    """Run the micro-batch of a bundle on the model with its weights, and diagnose it.

    Args:
        bundle: The bundle.
        micro_batch: Its micro-batch, ready to run.
        model: The model that the micro-batch runs on.
        fp32: Compute in fp32.
        without: Names of the guard's fallbacks to apply.
        limit: Magnitude beyond which finite sample values count as bad; None for no limit.
        masked_attention: True if the model's attention has masks, which rules out cuDNN. None: leave PyTorch's
            attention backends unchanged.
        notes: Messages to report with the result.
    """
    kind = bundle.facts["event"]["kind"]
    with ExitStack() as stack:
        # Restores PyTorch's attention backends at the end.
        stack.enter_context(kept_attention())
        if masked_attention is not None:
            choose_cudnn(masked=masked_attention)
        switches: list[Switch] = all_switches(model)
        names = {switch.name for switch in switches}
        # A recorded name may not exist here: another machine has other kernels and backends.
        for name in [*(n for n in bundle.facts["switched_off"] if n in names), *without]:
            # Components stay off until the end of the diagnosis.
            stack.enter_context(find_switch(switches, name).off())
        start = bundle.facts["start_peak"]
        suspects = Suspects(
            model,
            lambda: [],
            switches,
            start_peak=start,
            limit=limit,
            lockstep=needs_all_ranks(model),
        )
        if fp32:
            stack.enter_context(in_fp32(model))
        outcome = run(micro_batch, model)
        # Zero gradients are only a fault if they were the reason of the recorded failure.
        healthy = outcome.is_healthy(needs_gradient=kind == "zero_gradient")
        verdict = None if healthy else diagnose(micro_batch, suspects, kind=kind)
        # If the weights were the reason of the failure, the replay is healthy: check their magnitude.
        if verdict is None and has_run_away(weight_peak(bundle.weights.values()), start):
            verdict = run_away(micro_batch, suspects)
    return Replayed(outcome, verdict, micro_batch.ids, bundle.facts["event"], tuple(notes))


def other_versions(bundle: Bundle, here: Mapping[str, str]) -> list[str]:
    """A message that lists packages whose version differs from the bundle's; empty if none does."""
    recorded_versions = bundle.facts["packages"]
    differing = [
        f"{n}: {recorded_versions[n]} then, {here.get(n)} now"
        for n in recorded_versions
        if here.get(n) != recorded_versions[n]
    ]
    return [listed("other versions", differing)] if differing else []
