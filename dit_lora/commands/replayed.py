"""Runs and diagnoses the micro-batch of a bundle, after its model was rebuilt."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from dit_lora.errors import format_list
from dit_lora.guard.diagnose import diagnose
from dit_lora.guard.diagnosis import Diagnosis, DiagnosisContext
from dit_lora.guard.fallbacks import (
    Fallback,
    convert_to_fp32,
    enable_cudnn_unless_masked,
    find_fallback,
    list_fallbacks,
    preserve_attention_backends,
)
from dit_lora.guard.replay import MicroBatch, ReplayOutcome, replay_micro_batch
from dit_lora.guard.repro_bundle import Bundle
from dit_lora.guard.state_checks import compute_weight_peak, diagnose_diverged_weights, is_unusable_magnitude
from dit_lora.numerics.dtensors import has_collective_forward


@dataclass(frozen=True)
class ReplayResult:
    """The result of replaying a bundle."""

    outcome: ReplayOutcome
    diagnosis: Diagnosis | None
    """The diagnosis; None if the micro-batch was healthy."""
    sample_ids: tuple[str, ...]
    """The samples, in the order of the outcome's losses."""
    recorded_event: dict[str, Any]
    """The event that the run recorded."""
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Result of a replay as JSON-compatible values."""
        return {
            "healthy": self.diagnosis is None,
            "verdict": self.diagnosis.to_record() if self.diagnosis else None,
            "recorded": self.recorded_event,
            "sample_ids": list(self.sample_ids),
            "losses": [str(loss) for loss in self.outcome.losses],
            "timesteps": list(self.outcome.timesteps),
            "notes": list(self.notes),
        }

    def format_text(self) -> str:
        """Result of a replay as text.

        It has both diagnoses, each sample's loss and timestep, and the trail to the first bad value.
        """
        step, recorded = self.recorded_event["step"], self.recorded_event["verdict"]
        lines = [f"recorded: step {step}: {recorded['cause']}: {recorded['words']}"]
        if self.diagnosis is None:
            lines.append("replayed: healthy; the event does not happen again here")
        else:
            lines.append(f"replayed: {self.diagnosis.cause}: {self.diagnosis.message}")
        rows = zip(self.sample_ids, self.outcome.losses, self.outcome.timesteps, strict=True)
        lines += [f"  {sample}: loss {loss:g} at timestep {t}" for sample, loss, t in rows]
        trail = self.diagnosis.evidence.get("trail", []) if self.diagnosis else []
        return "\n".join([*lines, *(f"  {step}" for step in trail), *self.notes])


def run_and_diagnose_micro_batch(
    bundle: Bundle,
    micro_batch: MicroBatch,
    model: nn.Module,
    *,
    fp32: bool,
    without: Sequence[str],
    limit: float | None,
    masked_attention: bool | None,
    notes: Sequence[str],
) -> ReplayResult:
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
        switches = apply_replay_options(
            stack, bundle, model, disabled_names=without, masked_attention=masked_attention
        )
        start = bundle.facts["start_peak"]
        context = DiagnosisContext(
            model,
            switches,
            start_peak=start,
            max_magnitude=limit,
            collective_forward=has_collective_forward(model),
        )
        if fp32:
            stack.enter_context(convert_to_fp32(model))
        outcome = replay_micro_batch(micro_batch, model)
        # Zero gradients are only a fault if they were the reason of the recorded failure.
        healthy = outcome.is_healthy(needs_gradient=kind == "zero_gradient")
        diagnosis = None if healthy else diagnose(micro_batch, context, kind=kind)
        # If the weights were the reason of the failure, the replay is healthy: check their magnitude.
        if diagnosis is None and is_unusable_magnitude(compute_weight_peak(bundle.weights.values()), start):
            diagnosis = diagnose_diverged_weights(micro_batch, context)
    return ReplayResult(outcome, diagnosis, micro_batch.ids, bundle.facts["event"], tuple(notes))


def apply_replay_options(
    stack: ExitStack, bundle: Bundle, model: nn.Module, *, disabled_names: Sequence[str], masked_attention: bool | None
) -> list[Fallback]:
    """Switch off what the run had off, and `disabled_names`, until `stack` is closed. Returns the model's fallbacks.

    `masked_attention` is that of `run_and_diagnose_micro_batch`.
    """
    # Restores PyTorch's attention backends at the end.
    stack.enter_context(preserve_attention_backends())
    if masked_attention is not None:
        enable_cudnn_unless_masked(masked=masked_attention)
    switches = list_fallbacks(model)
    names = {switch.name for switch in switches}
    # A recorded name may not exist here: another machine has other kernels and backends.
    for name in [*(n for n in bundle.facts["switched_off"] if n in names), *disabled_names]:
        # Components stay off until the end of the diagnosis.
        stack.enter_context(find_fallback(switches, name).disable_temporarily())
    return switches


def describe_version_differences(bundle: Bundle, current_versions: Mapping[str, str]) -> list[str]:
    """A message that lists packages whose version differs from the bundle's; empty if none does."""
    recorded_versions = bundle.facts["packages"]
    differing = [
        f"{n}: {recorded_versions[n]} then, {current_versions.get(n)} now"
        for n in recorded_versions
        if current_versions.get(n) != recorded_versions[n]
    ]
    return [format_list("other versions", differing)] if differing else []
