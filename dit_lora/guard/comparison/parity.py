"""Compare a fused kernel with its reference, and with itself, on the user's own model, shapes and samples."""

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
    """The first place where a kernel and its reference part, or a kernel and itself."""

    switch: str
    module: str
    """The first such module in order of execution; or the parameter or input whose gradient differs."""
    error: float
    """Root mean square of the difference over that of the reference, of the worst sample; NaN if one is not finite."""
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
"""Runs the model on the same inputs at each call; losses by sample, (B,)."""


def first_difference(
    switch: Switch,
    losses: Losses,
    model: nn.Module,
    *,
    others: Sequence[Switch] = (),
    how: How | None = None,
) -> Difference | None:
    """Return where outputs or gradients with the kernel differ from those without it or from themselves; None if
    nowhere.

    `others` are off all the time. Give losses of several different samples: OpenDiT's fused modulation used the
    first sample's scale and shift for all of them, and was right for a batch of one. Blocks are compared one by
    one on the stock model's inputs; those in half precision also in fp32, which tells a small wrong from rounding.
    What is no part of a block (torch.compile, another attention for a whole model) is compared in the whole model,
    in the dtype that it has. A sharded model (FSDP2) is compared on all ranks at once, as it is alone.
    """
    how = how or How()
    of_blocks = switch.cause == "kernel" or switch.part_of is not None
    with ExitStack() as stack:
        if switch.name == COMPILE or not of_blocks:
            for other in others:
                stack.enter_context(other.off())
            difference = _located(switch, losses, model)
            if how.coverage is not None:
                how.coverage.compared.add("")
            return difference
        if how.learning is None:
            how = replace(how, learning=_learning(losses, model))
        stack.enter_context(_quietly(model))
        return _in_blocks(switch, losses, model, others, how)


def differences(
    switches: Sequence[Switch], compare: Callable[[Switch, Sequence[Switch]], Difference | None]
) -> Iterator[tuple[Switch, Difference]]:
    """Yield every switch whose kernels differ; its parts one by one, all others off, only where a whole differs.

    `compare` is given a switch and what is to be off meanwhile: one kernel's fault is not another's. Switch off
    what is yielded before asking for the next: then the whole is asked once more.
    """
    wholes = [switch for switch in switches if switch.part_of is None]
    # Compilation is last: it compiles the other kernels, which must be right first. So are kernels that add rounding.
    wholes.sort(key=lambda switch: (switch.name == COMPILE, switch.error > 0))
    for switch in wholes:
        on_top = switch.name == COMPILE or switch.error > 0
        others = [] if on_top else [o for o in wholes if _apart_from(o, switch)]
        of_whole = compare(switch, others)
        parts = [part for part in switches if part.part_of == switch.name]
        if of_whole is None:
            continue
        blamed = False
        for part in parts:
            difference = compare(part, [*others, *(o for o in parts if o is not part)])
            if difference is not None:
                blamed = True
                yield part, difference
        # The parts to blame are off by now: is the rest of it right?
        if blamed:
            of_whole = compare(switch, others)
        if of_whole is not None:
            yield switch, of_whole


def _apart_from(other: Switch, switch: Switch) -> bool:
    return other is not switch and other.name != COMPILE


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """Leave the model's state, random state and gradients as they were; within, nothing runs compiled."""
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
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _learning(losses: Losses, model: nn.Module) -> Learning:
    with (
        noting_inputs(model) as noted,
        torch.enable_grad(),
        eager(model),
        torch.random.fork_rng(cuda_devices(model)),
    ):
        losses()
    return noted


def _in_blocks(
    switch: Switch, losses: Losses, model: nn.Module, others: Sequence[Switch], how: How
) -> Difference | None:
    backends = [
        part
        for part in model_switches(model)
        if part.cause == "attention_backend" and part.part_of == switch.name
    ]

    def compared(inside: str | None) -> BlockComparison:
        comparison = BlockComparison(model, switch, others, backends, how, inside)
        comparison.run(losses)
        return comparison

    first = compared(None)
    if how.coverage is not None:
        how.coverage.compared |= first.coverage.compared
        how.coverage.missed |= first.coverage.missed
    place = _agreed(first.differences, model)
    # Once more, inside that block, to name the module in it; a name ends at the first space.
    if place is not None and place.repeats and not place.where.startswith(GRADIENT):
        block = place.where.partition(" ")[0]
        place = _agreed(compared(block).differences, model) or place
    return Difference(switch.name, place.where, place.error, place.repeats) if place else None


def _agreed(places: Sequence[Apart], model: nn.Module) -> Apart | None:
    """Return the first, and before all where a kernel is not even as itself; on all ranks of a model that needs
    them, the same.
    """
    # What follows is collective again: all ranks must look at the same place.
    lists = gather_object([list(places)]) if needs_all_ranks(model) else [places]
    every = [place for rank_places in lists for place in rank_places]
    return next((place for place in every if not place.repeats), None) or next(iter(every), None)


def _located(switch: Switch, losses: Losses, model: nn.Module) -> Difference | None:
    difference = _compare(switch, losses, model, _blocks(model))
    if difference is None or not difference.repeats or difference.module.startswith(GRADIENT):
        return difference
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
        # The kernel against itself: the reference cannot tell a race from an error.
        unsteady = apart(fused, _values(losses, model, modules))
        if any(p.is_cuda for p in model.parameters()):
            # PyTorch's own ops may sum in any order there.
            unsteady = 0.0
    # Computed in, whatever a value is kept in: gradients of fp32 adapters, norms under autocast.
    dtypes = [x.dtype for x in references.values() if x.dtype in WHOLE]
    lowest = max(dtypes, key=lambda dtype: WHOLE[dtype].output, default=torch.float32)
    place = first_apart(references, fused, WHOLE[lowest])
    difference = None
    if unsteady:
        difference = Difference(switch.name, "the whole model", unsteady, repeats=False)
    elif place is not None:
        difference = Difference(switch.name, *place)
    if needs_all_ranks(model):  # one answer for all ranks, so that none goes on alone
        return next((one for one in gather_object([difference]) if one is not None), None)
    return difference


def _blocks(model: nn.Module) -> list[str]:
    """Return the repeated blocks of a transformer, and what stands beside them."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    beside = [name for name, _ in model.named_children() if name not in outermost]
    inside = [
        f"{name}.{child}"
        for name in outermost
        for child, _ in model.get_submodule(name).named_children()
    ]
    return [*beside, *inside]


def _values(losses: Losses, model: nn.Module, modules: Sequence[str]) -> Values:
    """Return these modules' outputs in order of execution, then every trained parameter's gradient; on the CPU."""
    values: Values = {}
    with recording(model, modules, values), torch.random.fork_rng(cuda_devices(model)):
        grads = _gradients(losses().mean(), dict(model.named_parameters()))
    return values | gradients({name: grad.cpu().clone() for name, grad in grads.items()})


def _gradients(loss: torch.Tensor, parameters: Mapping[str, nn.Parameter]) -> Values:
    """Return gradients by name; the parameters' own `grad` stays as it was."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not any(isinstance(parameter, DTensor) for parameter in trained.values()):
        # Past the hooks on accumulated gradients: within DDP's forward they would be its step's.
        grads = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        pairs = zip(trained, grads, strict=True)
        return {name: gradient for name, gradient in pairs if gradient is not None}
    # FSDP2 computes with gathered copies: a whole backward pass alone brings gradients to its parameters.
    own_grads = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        loss.backward()
        return {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = own_grads[name]
