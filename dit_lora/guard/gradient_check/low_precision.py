"""Check a step in bf16 or fp16 through replays in fp32.

Noise in bf16 hides errors of up to 10 % from a comparison of slopes. So a check has three parts:

1. The step is replayed in fp32, forward and backward, and that gradient is compared with the loss's slope in fp32.
2. The step is replayed in its own precision. Its gradient must be that of the replay, element by element, apart from
   what two replays differ by.
3. The gradients of both replays must agree up to rounding. If they do not, or if fp32 is not possible, slopes are
   compared in the step's own precision, with a wide bound.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from dit_lora.guard.gradient_check.cause import ReplayableStep
from dit_lora.guard.gradient_check.check import (
    FaultLocation,
    GradientReport,
    check_gradient,
    describe_loss_change,
    get_module_name,
)
from dit_lora.guard.gradient_check.ranks import GradientCheckError, run_or_raise_on_all_ranks
from dit_lora.guard.gradient_check.slopes import TOLERANCES
from dit_lora.guard.replay import get_cuda_devices, preserve_gradients
from dit_lora.numerics.finite import HALF_DTYPES
from dit_lora.numerics.memory import has_memory_for_fp32

Gradients = Mapping[str, torch.Tensor]
"""Gradients by parameter name; missing ones are left out."""

_EVALUATIONS_PER_REPLAY = 2
"""Cost of a forward and backward pass, in evaluations of the loss."""
_EVALUATIONS_IN_FP32 = 3
"""Cost of an evaluation in fp32, in evaluations in 16 bits: on a GPU, TF32 has half the speed and twice the bytes."""
_MAX_REPLAY_ERROR = 0.02
"""Relative error of a layer's gradient that a replay may have; on a CPU, replays have equal bits."""
_MAX_NOISE = 0.1
"""Relative difference of the gradients of two replays above which they prove nothing."""
_NOISE_FACTOR = 5.0
"""The error may be so many times the difference of two replays, which ops with atomic additions cause."""


def check_step_gradient(
    step: ReplayableStep,
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    step_loss: float | None = None,
    allow_fp32: bool = True,
) -> GradientReport:
    """Compare a step's gradient, which is in `grad` of its parameters, with the slope of its loss. Collective.

    Args:
        step: The step, which can be replayed.
        groups: Names of parameters by parameter group.
        step_loss: The loss that the step had, if known.
        allow_fp32: False if the model's weights must not be converted, such as those that are offloaded.

    Returns:
        The report of `check_gradient`. For a step in 16 bits, it is in fp32 if that fits into memory.
    """
    # Gradients of two replays, and the original weights while others are moved.
    copied_bytes = 3 * sum(p.nbytes for p in step.parameters.values())
    if step.dtype in HALF_DTYPES and allow_fp32 and has_memory_for_fp32(step.model, copied_bytes):
        report = None
        # A model may have ops that exist in 16 bits only. An error on one rank ends the attempt on all.
        with suppress(GradientCheckError):
            report = run_or_raise_on_all_ranks(lambda: _check_in_fp32(step, groups, step_loss))
        if report is not None:
            return report
    return check_gradient(step.compute_terms, step.parameters, dtype=step.dtype, groups=groups, step_loss=step_loss)


def _check_in_fp32(
    step: ReplayableStep, groups: Mapping[str, Sequence[str]] | None, step_loss: float | None
) -> GradientReport | None:
    """A report from replays in fp32; None if rounding makes the gradients of both precisions too different."""
    gradients = _list_gradients(step)
    # The check in the step's own precision reports it.
    if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
        return None
    with torch.random.fork_rng(get_cuda_devices(step.model)):
        replayed, loss = _replay_step_gradients(step)
        if reason := describe_loss_change(loss, step_loss, step.dtype):
            return GradientReport("cannot tell", (), _EVALUATIONS_PER_REPLAY, reason=reason)
        # Before the conversion to fp32, so that its gradients need not be kept.
        replay_error = _compare_with_replay(step, gradients, replayed)
        # Frees memory for the gradients in fp32.
        del replayed
        exact_step = replace(step, is_in_fp32=True)
        with exact_step.use_replay_precision(), preserve_gradients(step.model), _allow_tf32(step):
            exact_step.compute_gradients()
            exact = _list_gradients(exact_step)
            report = check_gradient(
                exact_step.compute_terms, exact_step.parameters, dtype=torch.float32, groups=groups
            )
    # The replay in the step's own precision is added below.
    num_evaluations = _EVALUATIONS_IN_FP32 * (report.num_evaluations + _EVALUATIONS_PER_REPLAY)
    report = replace(report, is_in_fp32=True, num_evaluations=num_evaluations + _EVALUATIONS_PER_REPLAY)
    # First: a fault that replays have too has a layer and a cause in the passes.
    if report.result == "differs":
        return report
    if replay_error is not None:
        return replace(replay_error, num_evaluations=report.num_evaluations + _EVALUATIONS_PER_REPLAY)
    # Slopes in low precision would not know more.
    if report.result == "cannot tell":
        return report
    # A kernel, or compiled code, may be wrong in low precision only.
    distance = measure_rounding(gradients, exact, step.dtype)
    return None if distance is None else replace(report, fp32_distance=distance)


def _replay_step_gradients(step: ReplayableStep) -> tuple[Gradients, float]:
    """Gradients and loss of a replay of the step. Collective."""
    with preserve_gradients(step.model):
        loss = step.compute_gradients()
        return _list_gradients(step), loss


def _list_gradients(step: ReplayableStep) -> Gradients:
    return {name: p.grad for name, p in step.parameters.items() if p.grad is not None}


@contextmanager
def _allow_tf32(step: ReplayableStep) -> Iterator[None]:
    """Compute fp32 matrix products of a GPU in TF32, which is about eight times as fast and finer than bf16."""
    if not get_cuda_devices(step.model):
        yield
        return
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _compare_with_replay(step: ReplayableStep, gradients: Gradients, replayed: Gradients) -> GradientReport | None:
    """A report of layers whose gradient is not that of replays; None if there are none. Collective."""
    errors = _compute_layer_differences(gradients, replayed)
    # On all ranks alike, because their gradients are equal.
    if not any(error for error, _ in errors.values()):
        return None
    # GPUs may sum in another order each time.
    noise = _compute_layer_differences(_replay_step_gradients(step)[0], replayed)
    total_noise, total_length = _combine_layer_norms(noise)
    # A race, or random numbers that a replay does not repeat.
    if total_noise > _MAX_NOISE * total_length:
        reason = f"gradients of two replays of the step differ by {total_noise / total_length:.2g} of their length"
        return GradientReport("cannot tell", (), 0, reason=reason)
    # Layers with almost no gradient are mostly rounding.
    floor = _MAX_REPLAY_ERROR * 0.1 * total_length / len(errors) ** 0.5
    layers = [
        layer
        for layer, (error, length) in errors.items()
        if error > _MAX_REPLAY_ERROR * length + _NOISE_FACTOR * noise[layer][0] + floor
    ]
    if not layers:
        return None
    total_error, total_length = _combine_layer_norms(errors)
    share = f"{total_error / total_length:.2g}" if total_length else "all"
    # A wrong scale, or another batch, makes all layers wrong.
    if len(layers) == len(errors):
        location, layer_text = FaultLocation(None, tuple(layers)), "all layers"
    else:
        # A backward pass goes from the last layer to the first, so the last is nearest to the fault.
        location = FaultLocation(layers[-1], (layers[-1],), earlier_layers="differs" if len(layers) > 1 else None)
        layer_text = location.description.removeprefix(", in ")
    reason = (
        f"the gradient is wrong: it differs from that of replays of the step by {share} of its length, in {layer_text}"
    )
    return GradientReport("differs", (), 0, location, reason)


def _compute_layer_differences(gradients: Gradients, reference: Gradients) -> dict[str, tuple[float, float]]:
    """By layer, the length of the difference and that of the reference. Missing gradients are zero."""
    squares: dict[str, tuple[float, float]] = {}
    for name in {**reference, **gradients}:
        present = [g.double() for g in (gradients.get(name), reference.get(name)) if g is not None]
        difference = present[0] - present[1] if len(present) == 2 else present[0]
        length = reference[name].double().norm().item() if name in reference else 0.0
        # A layer may have several tensors, such as A and B.
        error, total = squares.get(get_module_name(name), (0.0, 0.0))
        squares[get_module_name(name)] = (error + difference.norm().item() ** 2, total + length**2)
    return {layer: (error**0.5, total**0.5) for layer, (error, total) in squares.items()}


def _combine_layer_norms(lengths: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    """Lengths over all layers, of the differences and of the references."""
    total_error, total_length = (sum(values[k] ** 2 for values in lengths.values()) ** 0.5 for k in (0, 1))
    return total_error, total_length


def measure_rounding(gradients: Gradients, exact: Gradients, dtype: torch.dtype) -> float | None:
    """Relative distance of gradients in low precision from those in fp32; None if it is not of rounding only.

    The projections on the gradient, whole and with length 1 in each tensor, may differ as `TOLERANCES` say.
    """
    bias, spread, *_ = TOLERANCES[dtype]
    # A gradient that only one of them has was compared above, with that of a replay.
    names = [name for name in exact if name in gradients]
    error = exact_square = 0.0
    # By direction: projection of the exact gradient, of the gradient, and the sum of squares of the latter's terms.
    sums = [[0.0, 0.0, 0.0] for _ in range(2)]
    for name in names:
        # (elements,)
        values, exact_values = gradients[name].double().flatten(), exact[name].double().flatten()
        error += (values - exact_values).square().sum().item()
        exact_square += exact_values.square().sum().item()
        for direction_sums, length in zip(sums, (1.0, values.norm().item() or 1.0), strict=True):
            direction_sums[0] += (values @ exact_values).item() / length
            direction_sums[1] += (values @ values).item() / length
            direction_sums[2] += values.pow(4).sum().item() / length**2
    # A bias of the whole, and four standard deviations of independent errors, as in `compare_gradient_with_slopes`.
    for exact_projection, projection, squares in sums:
        if abs(exact_projection - projection) > bias * projection + 4 * spread * squares**0.5:
            return None
    return (error / exact_square) ** 0.5 if exact_square else 0.0
