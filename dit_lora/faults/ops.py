"""Faults of what computes: fused kernels, attention backends, ops that fail, precision that does not reach."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.backends import cuda

from dit_lora.faults.fault import Expected, Fault
from dit_lora.faults.world import Arm, Stage, Tensors
from dit_lora.guard.switches import Switch
from dit_lora.numerics.streams import Streams

_PLACE = "{attention}.{out}"
Change = Callable[[torch.Tensor], torch.Tensor]


class _BadGradient(torch.autograd.Function):
    """The identity, with a gradient that has one bad value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A division, as kernels do: the origin is an op, not a constant.
        scale = torch.ones(grad.shape, dtype=grad.dtype)
        scale.view(-1)[3] = 0.0
        return grad / scale * ctx.value, None


def divided(x: torch.Tensor) -> torch.Tensor:
    """Compute 0 / 0 in one place."""
    scale = torch.ones(x.shape, dtype=x.dtype)
    scale.view(-1)[5] = 0.0
    return x * scale / scale


def _bad_backward(x: torch.Tensor) -> torch.Tensor:
    return _BadGradient.apply(x, 1.0)


def _kernel(change: Change, module: str, *, from_step: int, rank: int = -1) -> Arm:
    """Put in a fused kernel that goes wrong in one module, with a switch that calls its reference."""

    def arm(stage: Stage) -> None:
        state = {"on": True, "armed": False}

        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
            return change(output) if state["on"] and state["armed"] else output

        stage.transformer.get_submodule(stage.site.named(module)).register_forward_hook(hook)
        _add_switch(stage, "kernel:wrong_op", state)
        if rank in (-1, stage.rank) or rank >= stage.ranks:
            stage.before_step(from_step, lambda: state.update(armed=True))

    return arm


def _restless(stage: Stage) -> None:
    """Put in a fused kernel of which every other call is off, whatever it is given."""
    calls = count()
    _kernel(lambda x: x * (1 + 0.01 * (next(calls) % 2)), _PLACE, from_step=3)(stage)


def _add_switch(stage: Stage, name: str, state: dict[str, bool]) -> None:
    @contextmanager
    def off() -> Iterator[None]:
        before = state["on"]
        state["on"] = False
        try:
            yield
        finally:
            state["on"] = before

    switch = Switch(name, "kernel", off, lambda: state.update(on=False), "its reference")
    stage.run.recovery.suspects.switches.append(switch)


def _wrong_rows(stage: Stage) -> None:
    """Give every sample the first one's scale and shift, as OpenDiT's fused modulation did (k_fused_modulate.py:38)."""
    state = {"on": True}

    def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output[:1].expand_as(output) if state["on"] else output

    # The linear layer that makes shift, scale and gate from the time embedding.
    stage.transformer.get_submodule(stage.site.named("{modulation}")).register_forward_hook(hook)
    _add_switch(stage, "kernel:modulate", state)


def _slightly_wrong_backward(stage: Stage) -> None:
    """Put in a kernel that is right forward and loses a fifth of its gradient backward."""
    state = {"on": True}

    def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        if state["on"] and output.requires_grad:
            output.register_hook(lambda grad: grad * 0.8)
        return output

    stage.transformer.get_submodule(stage.site.named(_PLACE)).register_forward_hook(hook)
    _add_switch(stage, "kernel:lossy_backward", state)


def _attention(change: Change) -> Arm:
    """Let the flash backend go wrong from step 3 on; the others are right."""

    def arm(stage: Stage) -> None:
        right, state = F.scaled_dot_product_attention, {"armed": False}

        def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
            output = right(*args, **kwargs)
            return change(output) if state["armed"] and cuda.flash_sdp_enabled() else output

        stage.patch(F, "scaled_dot_product_attention", attention)
        stage.before_step(3, lambda: state.update(armed=True))

    return arm


def _masked_row(output: torch.Tensor) -> torch.Tensor:
    """Return what softmax makes of a row in which every key is masked: exp(-inf - -inf)."""
    masked = torch.zeros_like(output)
    masked[..., -1, :] = -torch.inf
    return output + (masked - masked)


def op_of_target(change: Change, module: str) -> Arm:
    """Let an op in a module fail for one sample's values only."""

    def arm(stage: Stage) -> None:
        rows: list[list[bool]] = [[]]

        def note(batch: Tensors, streams: Streams) -> Tensors:
            rows[0] = stage.is_target(batch)
            return batch

        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
            parts = output.chunk(max(1, len(rows[0])))
            if len(parts) != len(rows[0]):
                return output  # no batch of samples: the probe that a run's start and end note
            pairs = zip(parts, rows[0], strict=True)
            return torch.cat([change(part) if is_target else part for part, is_target in pairs])

        stage.checkpoint.before.append(note)
        stage.transformer.get_submodule(stage.site.named(module)).register_forward_hook(hook)

    return arm


def _hidden(stage: Stage) -> None:
    """Put Inf into a linear layer's output, which the module around it cuts back: the loss never shows it."""

    def overflow(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():  # what the base gives is noted, and stays as it was
            return output
        spot = torch.zeros(output.shape, dtype=output.dtype)
        spot.view(-1)[3] = 3e38
        return output + spot * 10

    def cut(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.clamp(-10, 10) if torch.is_grad_enabled() else output

    stage.transformer.get_submodule(stage.site.ff_out).register_forward_hook(overflow)
    stage.transformer.get_submodule(stage.site.ff).register_forward_hook(cut)


def _half_schedule(stage: Stage) -> None:
    """Compute 1 / (1 - alpha_bar) in the weights' dtype: in bf16 alpha_bar rounds to 1 (N9, N10)."""
    module = stage.transformer.get_submodule(stage.site.ff)
    state = {"armed": False}
    stage.before_step(3, lambda: state.update(armed=True))

    def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        if not state["armed"]:
            return output
        dtype = next(module.parameters()).dtype
        alpha_bar = torch.tensor(1 - 1e-4, dtype=dtype)
        return output / (1 - alpha_bar) * 1e-4

    module.register_forward_hook(hook)


_KERNEL = Expected("kernel", "fallback", ("kernel:wrong_op",), module=_PLACE, same_as="clean")
_FLASH = Expected("attention_backend", "fallback", ("attention:flash",), close_to="clean")
_OP = Expected("data", "quarantine", ("first",), names_target=True, same_as="without")
# Several samples in a micro-batch: with one, there are no rows to mix up.
CHECKED = (("guard.preflight", True), ("train.batch_size", 2), ("train.accumulate", 1))
_MODULATE = Expected(
    "kernel",
    "fallback",
    ("kernel:modulate", "{modulation}"),
    same_as="clean",
)
_LATE = Expected("kernel", "rollback", ("kernel:wrong_op",), same_as="clean")
"""The place is its own output, or where a residual hides that, a gradient."""
_LOSSY = Expected("kernel", "fallback", ("kernel:lossy_backward", "gradient"), same_as="clean")
# The adapter alone: on a CPU, autocast leaves LayerNorm the dtypes that it is given, and queries that train are fp32.
BF16 = (
    ("model.dtype", "bf16"),
    ("guard.max_skips", 2),
    ("optim.groups", {"adapter": {"lr": 1e-3}}),
)
FAULTS: tuple[Fault, ...] = (
    Fault(
        "a fused kernel that gives NaN",
        "kernel",
        "from step 3",
        _KERNEL,
        _kernel(divided, _PLACE, from_step=3),
    ),
    Fault(
        "a fused kernel whose backward gives NaN",
        "kernel",
        "from step 3",
        _KERNEL,
        _kernel(_bad_backward, _PLACE, from_step=3),
    ),
    Fault(
        "a fused kernel that gives Inf",
        "kernel",
        "from step 1",
        _KERNEL,
        _kernel(lambda x: x / (x - x), _PLACE, from_step=1),
    ),
    Fault(
        "a fused kernel that fails on one rank",
        "rank",
        "from step 3, rank 1",
        Expected("rank", "stop", ("rank 1",), exit_code=3, nobody_lost=True),
        _kernel(divided, _PLACE, from_step=3, rank=1),
        ranks=2,
    ),
    Fault(
        "OpenDiT's wrong-row modulation",
        "kernel",
        "before the run",
        _MODULATE,
        _wrong_rows,
        CHECKED,
        needs=("modulation",),
    ),
    Fault(
        "a fused kernel that is wrong only backward",
        "kernel",
        "before the run",
        _LOSSY,
        _slightly_wrong_backward,
        CHECKED,
    ),
    Fault(
        "a fused kernel that is 0.1 % off late",
        "kernel",
        "from step 3",
        _LATE,
        _kernel(lambda x: x * 1.001, _PLACE, from_step=3),
        (*CHECKED, ("guard.parity_every", 2)),
    ),
    Fault(
        "a fused kernel that gives other values each time",
        "kernel",
        "from step 3",
        replace(_LATE, words=("kernel:wrong_op", "nondeterministic"), module=None),
        _restless,
        (*CHECKED, ("guard.parity_every", 2)),
    ),
    Fault(
        "flash attention that gives NaN",
        "attention",
        "from step 3",
        _FLASH,
        _attention(divided),
    ),
    Fault(
        "flash attention that gives NaN for a fully masked row",
        "attention",
        "from step 3",
        _FLASH,
        _attention(_masked_row),
    ),
    Fault(
        "flash attention whose backward gives NaN",
        "attention",
        "from step 3",
        _FLASH,
        _attention(_bad_backward),
    ),
    Fault(
        "an op that divides by zero for one sample",
        "op",
        "every time",
        Expected("data", "quarantine", ("first nan in the forward",), True, _PLACE, "without"),
        op_of_target(divided, _PLACE),
    ),
    Fault(
        "an op that overflows for one sample",
        "op",
        "every time",
        Expected(
            "data",
            "quarantine",
            ("first inf in the forward",),
            True,
            "{ff}",
            "without",
        ),
        op_of_target(lambda x: x * 3e38 * 3e38, "{ff}"),
    ),
    Fault(
        "an op that fails only backward for one sample",
        "op",
        "every time",
        Expected("data", "quarantine", ("in the backward",), True, _PLACE, "without"),
        op_of_target(_bad_backward, _PLACE),
    ),
    Fault(
        "an op after the last block that fails",
        "op",
        "every time",
        _OP,
        op_of_target(divided, "{last}"),
    ),
    Fault(
        "an Inf that a clamp hides",
        "precision",
        "every step",
        Expected("precision", "report", ("something hides it",), module="{ff_out}"),
        _hidden,
        (("guard.monitor_every", 1),),
    ),
    Fault(
        "a schedule that rounds to zero in bf16",
        "precision",
        "from step 3",
        Expected(
            "precision",
            "stop",
            ("finite in fp32",),
            module="{ff}",
            exit_code=3,
        ),
        _half_schedule,
        BF16,
    ),
)
