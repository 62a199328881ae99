"""Faults of what computes: fused kernels, attention backends, ops that fail, precision that does not reach."""

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from benchmarks.faults.arms import OUTPUT, at_once, attention, kernel, module_output
from benchmarks.faults.fault import Expected, Fault, from_step
from benchmarks.faults.triggers import (
    Change,
    When,
    backward_of,
    by_zero,
    divided,
    first_row,
    in_turn,
    overflowing,
    times,
)
from benchmarks.faults.world import Arm, Overrides, Stage, Tensors
from dit_lora.numerics.streams import RandomStreams

_ALWAYS = When("from", 0)


def _restless(when: When) -> Arm:
    """Add a fused kernel that is wrong in every other call, for all inputs."""

    def arm(stage: Stage) -> None:
        calls = count()
        kernel(lambda x: x * (1 + 0.01 * (next(calls) % 2)), when)(stage)

    return arm


def _masked_row(output: torch.Tensor) -> torch.Tensor:
    """The output of a softmax over a row whose keys are all masked: exp(-inf - -inf)."""
    masked = torch.zeros_like(output)
    masked[..., -1, :] = -torch.inf
    return output + (masked - masked)


def op_of_target(change: Change, module: str) -> Arm:
    """Let an op in a module fail for one sample's values only."""

    def arm(stage: Stage) -> None:
        rows: list[list[bool]] = [[]]
        calls = [count()]

        def note(batch: Tensors, streams: RandomStreams) -> Tensors:
            rows[0], calls[0] = stage.is_target(batch), count()
            return batch

        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
            if not stage.targets.batched:
                # Each call has the next sample of the batch.
                number = next(calls[0])
                return change(output) if number < len(rows[0]) and rows[0][number] else output
            parts = output.chunk(max(1, len(rows[0])))
            if len(parts) != len(rows[0]):
                return output  # no batch of samples: the probe that a run's start and end note
            pairs = zip(parts, rows[0], strict=True)
            return torch.cat([change(part) if is_target else part for part, is_target in pairs])

        stage.checkpoint.before.append(note)
        stage.module(module).register_forward_hook(hook)

    return arm


def _infinite_in_training(output: torch.Tensor) -> torch.Tensor:
    """Put in one Inf; what the base gives without gradients is noted, and stays as it was."""
    if not torch.is_grad_enabled():
        return output
    spot = torch.zeros(output.shape, dtype=output.dtype)
    spot.view(-1)[3] = 3e38
    return output + spot * 10


def _cut_in_training(output: torch.Tensor) -> torch.Tensor:
    return output.clamp(-10, 10) if torch.is_grad_enabled() else output


def _half_schedule(when: When) -> Arm:
    """Compute 1 / (1 - alpha_bar) in the weights' dtype: in bf16 alpha_bar rounds to 1 (N9, N10)."""

    def arm(stage: Stage) -> None:
        module = stage.module("{ff}")

        def change(output: torch.Tensor) -> torch.Tensor:
            alpha_bar = torch.tensor(1 - 1e-4, dtype=next(module.parameters()).dtype)
            return output / (1 - alpha_bar) * 1e-4

        module_output("{ff}", change, when)(stage)

    return arm


_KERNEL = Expected("kernel", "fallback", ("kernel:wrong_op",), module=OUTPUT, same_as="clean")
_FLASH = Expected("attention_backend", "fallback", ("attention:flash",), close_to="clean")
_RANK = Expected("rank", "stop", ("rank 1",), exit_code=3, nobody_lost=True)
# Several samples in a micro-batch: with one, there are no rows to mix up.
CHECKED = (("guard.preflight", "anew"), ("train.batch_size", 2), ("train.accumulate", 1))
COMPARED: Overrides = (*CHECKED, ("guard.parity_every", 2))
_MODULATE = Expected("kernel", "fallback", ("kernel:modulate", "{modulation}"), same_as="clean")
_LATE = Expected("kernel", "rollback", ("kernel:wrong_op",), same_as="clean")
"""The place is its own output, or where a residual hides that, a gradient."""
_RESTLESS = replace(_LATE, message_parts=("kernel:wrong_op", "nondeterministic"))
_LOSSY = Expected("kernel", "fallback", ("kernel:lossy_backward", "gradient"), same_as="clean")
_HIDDEN = Expected("precision", "report", ("hides it",), module="{ff_out}")
_PRECISION = Expected("precision", "stop", ("finite in fp32",), module="{ff}", exit_code=3)
# The adapter alone: on a CPU, autocast leaves LayerNorm the dtypes that it is given, and queries that train are fp32.
BF16: Overrides = (
    ("model.dtype", "bf16"),
    ("guard.max_skips", 2),
    ("optim.groups", {"adapter": {"lr": 1e-3}}),
)


def _kernel(name: str, change: Change, expected: Expected = _KERNEL, step: int = 3, **options: Any) -> Fault:
    return from_step(name, "kernel", expected, partial(kernel, change), step, **options)


def _flash(name: str, change: Change) -> Fault:
    return from_step(name, "attention", _FLASH, partial(attention, change))


def _op(name: str, change: Change, message_part: str, module: str = OUTPUT) -> Fault:
    expected = Expected("data", "quarantine", (message_part,), True, module, "without")
    return Fault(name, "op", "every time", expected, op_of_target(change, module))


_BACKWARD = backward_of(by_zero)
FAULTS: tuple[Fault, ...] = (
    _kernel("a fused kernel that gives NaN", divided),
    _kernel("a fused kernel whose backward gives NaN", _BACKWARD),
    _kernel("a fused kernel that gives Inf", lambda x: x / (x - x), step=1),
    from_step(
        "a fused kernel that fails on one rank",
        "rank",
        _RANK,
        partial(kernel, divided),
        rank=1,
        ranks=2,
    ),
    Fault(
        "OpenDiT's wrong-row modulation",  # k_fused_modulate.py:38
        "kernel",
        "before the run",
        _MODULATE,
        # The place is the linear layer that makes shift, scale and gate from the time embedding.
        kernel(first_row, _ALWAYS, "kernel:modulate", "{modulation}"),
        CHECKED,
        needs=("modulation", "batched"),
    ),
    Fault(
        "a fused kernel that is wrong only backward",
        "kernel",
        "before the run",
        _LOSSY,
        kernel(backward_of(times(0.8)), _ALWAYS, "kernel:lossy_backward"),
        CHECKED,
    ),
    _kernel("a fused kernel that is 0.1 % off late", in_turn(0.001), _LATE, overrides=COMPARED),
    from_step(
        "a fused kernel that gives other values each time",
        "kernel",
        _RESTLESS,
        _restless,
        overrides=COMPARED,
    ),
    _flash("flash attention that gives NaN", divided),
    _flash("flash attention that gives NaN for a fully masked row", _masked_row),
    _flash("flash attention whose backward gives NaN", _BACKWARD),
    _op("an op that divides by zero for one sample", divided, "first nan in the forward"),
    _op("an op that overflows for one sample", overflowing, "first inf in the forward", "{ff}"),
    _op("an op that fails only backward for one sample", _BACKWARD, "in the backward"),
    Fault(
        "an op after the last block that fails",
        "op",
        "every time",
        Expected("data", "quarantine", ("first",), names_target=True, same_as="without"),
        op_of_target(divided, "{final_proj}"),
    ),
    Fault(
        "an Inf that a clamp hides",  # cut back by the module around, so that the loss never shows it
        "precision",
        "every step",
        _HIDDEN,
        at_once(
            module_output("{ff_out}", _infinite_in_training, _ALWAYS),
            module_output("{ff}", _cut_in_training, _ALWAYS),
        ),
        (("guard.monitor_every", 1),),
    ),
    from_step(
        "a schedule that rounds to zero in bf16",
        "precision",
        _PRECISION,
        _half_schedule,
        overrides=BF16,
    ),
)
