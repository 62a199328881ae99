"""Compare a fused kernel with its reference, and with itself, on the user's model, shapes and samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dit_lora.guard.comparison.block_parity import (
    Apart,
    BlockComparison,
    How,
    Learning,
    noting_inputs,
)
from dit_lora.guard.comparison.parity_values import (
    GRADIENT,
    WHOLE,
    Values,
    apart,
    first_apart,
    gradients,
    recording,
    stirred,
    without_dropout,
)
from dit_lora.guard.replay import cuda_devices
from dit_lora.guard.switches import COMPILE, Switch, eager, model_switches
from dit_lora.numerics.dtensors import needs_all_ranks, whole
from dit_lora.numerics.opaque import called_modules
from dit_lora.numerics.ranks import gather_object


@dataclass(frozen=True)
class Difference:
    """The first place where a kernel differs from its reference, or from itself in another run."""

    switch: str
    module: str
    """The first module that differs, in order of execution; or the parameter or input whose gradient differs."""
    error: float
    """RMS of the difference over RMS of the reference, for the worst sample; NaN if a value is not finite."""
    repeats: bool = True
    """True if the kernel gives the same values for the same inputs."""

    @property
    def words(self) -> str:
        if self.repeats:
            return (
                f"kernel {self.switch} differs from its reference at {self.module} "
                f"(relative error {self.error:.2g})"
            )
        return (
            f"kernel {self.switch} is nondeterministic at {self.module}: the same inputs gave other values "
            f"(relative error {self.error:.2g})"
        )


Losses = Callable[[], torch.Tensor]
"""Runs the model on the same inputs at each call; returns losses per sample, (B,)."""


def first_difference(
    switch: Switch,
    losses: Losses,
    model: nn.Module,
    *,
    others: Sequence[Switch] = (),
    how: How | None = None,
) -> Difference | None:
    """The first place where outputs or gradients with the kernel differ from those without it, or between runs.

    None if there is none. `others` are off all the time. Pass losses of several different samples: OpenDiT's fused
    modulation used the first sample's scale and shift for all of them, and was correct for a batch of one. Blocks are
    compared one at a time on the reference model's inputs; those in half precision also in fp32, which tells a small
    error from rounding. Switches that are not part of a block (torch.compile, another attention for a whole model) are
    compared in the whole model, in its dtype. A sharded model (FSDP2) is compared on all ranks together.
    """
    how = how or How()
    is_in_blocks = switch.cause == "kernel" or switch.part_of is not None
    with ExitStack() as stack:
        if switch.name == COMPILE or not is_in_blocks:
            for other_fallback in others:
                stack.enter_context(other_fallback.off())
            difference = _located(switch, losses, model)
            if how.coverage is not None:
                how.coverage.compared.add("")
            return difference
        # An extra training forward shows which block inputs need a gradient.
        if how.learning is None:
            how = replace(how, learning=_learning(losses, model))
        stack.enter_context(_quietly(model))
        return _in_blocks(switch, losses, model, others, how)


def differences(
    switches: Sequence[Switch], compare: Callable[[Switch, Sequence[Switch]], Difference | None]
) -> Iterator[tuple[Switch, Difference]]:
    """Yield every switch whose kernels differ. If a whole differs, its parts are compared separately, all others off.

    `compare` receives a switch and the switches to turn off meanwhile, so that one kernel's error is not attributed to
    another. Turn off each yielded switch before asking for the next: then the whole is compared once more.
    """
    wholes = [fallback for fallback in switches if fallback.part_of is None]
    # Compilation and kernels that add rounding come last: they run on top of the others, which must be correct first.
    wholes.sort(key=lambda fallback: (fallback.name == COMPILE, fallback.error > 0))
    for fallback in wholes:
        runs_on_top = fallback.name == COMPILE or fallback.error > 0
        other_fallbacks = (
            []
            if runs_on_top
            else [candidate for candidate in wholes if _apart_from(candidate, fallback)]
        )
        whole_difference = compare(fallback, other_fallbacks)
        parts = [part for part in switches if part.part_of == fallback.name]
        if whole_difference is None:
            continue
        has_bad_part = False
        # Compare each part with all others off, so that an error is attributed to one of them.
        for part in parts:
            difference = compare(
                part,
                [*other_fallbacks, *(candidate for candidate in parts if candidate is not part)],
            )
            if difference is not None:
                has_bad_part = True
                yield part, difference
        # The bad parts are off by now, so compare the remaining parts together.
        if has_bad_part:
            whole_difference = compare(fallback, other_fallbacks)
        if whole_difference is not None:
            yield fallback, whole_difference


def _apart_from(other: Switch, switch: Switch) -> bool:
    return other is not switch and other.name != COMPILE


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers, random state and gradients on exit; nothing runs compiled inside the context."""
    # Blocks run many times, and some, such as batch norms, write to buffers.
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with (
        stirred(model),
        without_dropout(model),
        eager(model),
        torch.random.fork_rng(cuda_devices(model)),
    ):
        try:
            yield
        finally:
            for buffer, copy in buffers:
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)


def _learning(losses: Losses, model: nn.Module) -> Learning:
    with (
        noting_inputs(model) as flags,
        torch.enable_grad(),
        eager(model),
        torch.random.fork_rng(cuda_devices(model)),
    ):
        losses()
    return flags


def _in_blocks(
    switch: Switch, losses: Losses, model: nn.Module, others: Sequence[Switch], how: How
) -> Difference | None:
    # Attention backends are parts of this kernel; flash attention, for one, does not compute in fp32.
    backends = [
        part
        for part in model_switches(model)
        if part.cause == "attention_backend" and part.part_of == switch.name
    ]

    def compared(inside: str | None) -> BlockComparison:
        comparison = BlockComparison(model, switch, others, backends, how, inside)
        comparison.run(losses)
        return comparison

    comparison = compared(None)
    if how.coverage is not None:
        how.coverage.compared |= comparison.coverage.compared
        how.coverage.missed |= comparison.coverage.missed
    difference = _agreed(comparison.differences, model)
    # Compare inside that block to find the submodule. The block's name ends at the first space.
    if difference is not None and difference.repeats and not difference.where.startswith(GRADIENT):
        block = difference.where.partition(" ")[0]
        difference = _agreed(compared(block).differences, model) or difference
    return (
        Difference(switch.name, difference.where, difference.error, difference.repeats)
        if difference
        else None
    )


def _agreed(places: Sequence[Apart], model: nn.Module) -> Apart | None:
    """The first nondeterministic place, else the first place; the same on all ranks of a sharded model."""
    # The next comparison is collective, so all ranks must choose the same place.
    lists_by_rank = gather_object([list(places)]) if needs_all_ranks(model) else [places]
    all_differences = [
        candidate for rank_differences in lists_by_rank for candidate in rank_differences
    ]
    return next(
        (candidate for candidate in all_differences if not candidate.repeats), None
    ) or next(iter(all_differences), None)


def _located(switch: Switch, losses: Losses, model: nn.Module) -> Difference | None:
    difference = _compare(switch, losses, model, _blocks(model))
    if difference is None or not difference.repeats or difference.module.startswith(GRADIENT):
        return difference
    # Names such as "blocks.0 (output 1)" end at the first space.
    block = difference.module.partition(" ")[0]
    inside = [name for name, _ in called_modules(model) if name.startswith(f"{block}.")]
    return _compare(switch, losses, model, inside) or difference


def _compare(
    switch: Switch, losses: Losses, model: nn.Module, modules: Sequence[str]
) -> Difference | None:
    with stirred(model), without_dropout(model):
        with switch.off():
            references = _values(losses, model, modules)
        fused = _values(losses, model, modules)
        # Compare the kernel with itself: the reference cannot tell a race condition from an error.
        run_difference = apart(fused, _values(losses, model, modules))
        if any(p.is_cuda for p in model.parameters()):
            # On CUDA, PyTorch's ops may sum in any order.
            run_difference = 0.0
    # Use the lowest dtype of the computation. Values may be stored in a higher one, such as gradients of fp32
    # adapters.
    dtypes = [x.dtype for x in references.values() if x.dtype in WHOLE]
    lowest_dtype = max(dtypes, key=lambda dtype: WHOLE[dtype].output, default=torch.float32)
    mismatch = first_apart(references, fused, WHOLE[lowest_dtype])
    difference = None
    # A kernel that disagrees with itself cannot be compared with its reference.
    if run_difference:
        difference = Difference(switch.name, "the whole model", run_difference, repeats=False)
    elif mismatch is not None:
        difference = Difference(switch.name, *mismatch)
    if needs_all_ranks(model):  # all ranks must return the same result
        return next(
            (candidate for candidate in gather_object([difference]) if candidate is not None), None
        )
    return difference


def _blocks(model: nn.Module) -> list[str]:
    """Names of a transformer's repeated blocks, and of the modules outside them."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    # A list inside a block is part of that block.
    outermost = [n for n in lists if not any(n.startswith(f"{list_name}.") for list_name in lists)]
    outside = [name for name, _ in model.named_children() if name not in outermost]
    inside = [
        f"{name}.{child}"
        for name in outermost
        for child, _ in model.get_submodule(name).named_children()
    ]
    return [*outside, *inside]


def _values(losses: Losses, model: nn.Module, modules: Sequence[str]) -> Values:
    """These modules' outputs in order of execution, then every trained parameter's gradient, all on the CPU."""
    values: Values = {}
    with recording(model, modules, values), torch.random.fork_rng(cuda_devices(model)):
        grads = _gradients(losses().mean(), dict(model.named_parameters()))
    return values | gradients({name: grad.cpu().clone() for name, grad in grads.items()})


def _gradients(loss: torch.Tensor, parameters: Mapping[str, nn.Parameter]) -> Values:
    """Gradients by parameter name. The parameters' `grad` attributes are unchanged afterwards."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not any(isinstance(parameter, DTensor) for parameter in trained.values()):
        # autograd.grad bypasses the hooks on accumulated gradients, which DDP would take for its step's.
        grads = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        pairs = zip(trained, grads, strict=True)
        return {name: gradient for name, gradient in pairs if gradient is not None}
    # FSDP2 computes with gathered copies, so only a full backward pass sets gradients on its parameters.
    saved_grads = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        loss.backward()
        return {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = saved_grads[name]
