"""Whether a fused kernel computes what its reference does, and the same again: on the user's own model, shapes and samples."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor

from dit_lora.numerics.block_parity import (
    PASSES,
    Apart,
    BlockComparison,
    Coverage,
    Learning,
    noting_inputs,
)
from dit_lora.numerics.parity_values import (
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
from dit_lora.numerics.replay import cuda_devices
from dit_lora.numerics.shards import needs_all_ranks, whole
from dit_lora.numerics.switches import COMPILE, Switch, eager, model_switches
from dit_lora.numerics.whole import called_modules


@dataclass(frozen=True)
class Difference:
    """The first place where a kernel and its reference part, or a kernel and itself."""

    switch: str
    module: str
    """In order of execution; or the parameter or input whose gradient differs."""
    error: float
    """Root mean square of the difference over that of the reference, of the worst sample; NaN if one is not finite."""
    repeats: bool = True
    """Whether the kernel gives the same values for the same inputs."""

    @property
    def words(self) -> str:
        if self.repeats:
            return f"kernel {self.switch} differs from its reference at {self.module} (relative error {self.error:.2g})"
        return (
            f"kernel {self.switch} is nondeterministic at {self.module}: the same inputs gave other values "
            f"(relative error {self.error:.2g})"
        )


Losses = Callable[[], torch.Tensor]
"""Runs the model on the same inputs at each call; losses by sample, (B,)."""


@dataclass(frozen=True)
class How:
    """What a comparison may know beside the model and what runs it."""

    learning: Learning | None = None
    """Which inputs of blocks have a gradient in training; None to look, in a pass of its own."""
    coverage: Coverage | None = None
    """Where to note what was compared."""
    passes: int = PASSES
    """Through blocks, at the least, that ask whether the kernel repeats itself."""
    only: Collection[str] | None = None
    """The blocks that are compared, where not all are."""
    widen: bool = False
    """Whether there is one sample only, to which blocks are given a second."""


def first_difference(
    switch: Switch,
    losses: Losses,
    model: nn.Module,
    *,
    others: Sequence[Switch] = (),
    how: How | None = None,
) -> Difference | None:
    """Where outputs or gradients with the kernel differ from those without it or from themselves; None if nowhere.

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
            found = _located(switch, losses, model)
            if how.coverage is not None:
                how.coverage.compared.add("")
            return found
        if how.learning is None:
            how = replace(how, learning=_learning(losses, model))
        stack.enter_context(_quietly(model))
        return _in_blocks(switch, losses, model, others, how)


def differences(
    switches: Sequence[Switch], compare: Callable[[Switch, Sequence[Switch]], Difference | None]
) -> Iterator[tuple[Switch, Difference]]:
    """Every switch whose kernels differ; its parts one by one, all others off, only where a whole differs.

    `compare` is given a switch and what is to be off meanwhile: one kernel's fault is not another's. Switch off
    what is yielded before asking for the next: then the whole is asked once more.
    """
    wholes = [switch for switch in switches if switch.part_of is None]
    wholes.sort(
        key=lambda switch: switch.name == COMPILE
    )  # it compiles the others, which must be right first
    for switch in wholes:
        others = [] if switch.name == COMPILE else [o for o in wholes if _apart_from(o, switch)]
        found = compare(switch, others)
        parts = [part for part in switches if part.part_of == switch.name]
        if found is None:
            continue
        blamed = False
        for part in parts:
            difference = compare(part, [*others, *(o for o in parts if o is not part)])
            if difference is not None:
                blamed = True
                yield part, difference
        if blamed:
            found = compare(switch, others)
        if found is not None:
            yield switch, found


def _apart_from(other: Switch, switch: Switch) -> bool:
    return other is not switch and other.name != COMPILE


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """Nothing of the model's state, random state or gradients is another afterwards; nothing runs compiled."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with (
        stirred(model),
        without_dropout(model),
        eager(model),
        torch.random.fork_rng(cuda_devices(model)),
    ):
        try:
            yield
        finally:
            for buffer, before in kept:
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
        one
        for one in model_switches(model)
        if one.cause == "attention_backend" and one.part_of == switch.name
    ]

    def compared(inside: str | None) -> BlockComparison:
        one = BlockComparison(
            model,
            switch,
            others,
            backends,
            how.learning or {},
            how.passes,
            how.only,
            inside,
            how.widen,
        )
        one.run(losses)
        return one

    first = compared(None)
    if how.coverage is not None:
        how.coverage.compared |= first.coverage.compared
        how.coverage.missed |= first.coverage.missed
    found = _agreed(first.found, model)
    if found is not None and found.repeats and not found.where.startswith(GRADIENT):
        block = found.where.partition(" ")[0]
        found = _agreed(compared(block).found, model) or found
    return Difference(switch.name, found.where, found.error, found.repeats) if found else None


def _agreed(found: Sequence[Apart], model: nn.Module) -> Apart | None:
    """The first, and before all where a kernel is not even as itself; for all ranks of a model that needs them."""
    lists = gather_object([list(found)]) if needs_all_ranks(model) else [found]
    every = [one for each in lists for one in each]
    return next((one for one in every if not one.repeats), None) or next(iter(every), None)


def _located(switch: Switch, losses: Losses, model: nn.Module) -> Difference | None:
    found = _compare(switch, losses, model, _blocks(model))
    if found is None or not found.repeats or found.module.startswith(GRADIENT):
        return found
    block = found.module.partition(" ")[0]
    inside = [name for name, _ in called_modules(model) if name.startswith(f"{block}.")]
    return _compare(switch, losses, model, inside) or found


def _compare(
    switch: Switch, losses: Losses, model: nn.Module, modules: Sequence[str]
) -> Difference | None:
    with stirred(model), without_dropout(model):
        with switch.off():
            references = _values(losses, model, modules)
        fused = _values(losses, model, modules)
        unsteady = apart(fused, _values(losses, model, modules))
        if any(
            p.is_cuda for p in model.parameters()
        ):  # PyTorch's own ops may sum in any order there
            unsteady = 0.0
    # Computed in, whatever a value is kept in: gradients of fp32 adapters, norms under autocast.
    dtypes = [x.dtype for x in references.values() if x.dtype in WHOLE]
    lowest = max(dtypes, key=lambda dtype: WHOLE[dtype].output, default=torch.float32)
    place = first_apart(references, fused, WHOLE[lowest])
    found = None
    if unsteady:
        found = Difference(switch.name, "the whole model", unsteady, repeats=False)
    elif place is not None:
        found = Difference(switch.name, *place)
    if needs_all_ranks(model):  # one answer for all ranks, so that none goes on alone
        return next((one for one in gather_object([found]) if one is not None), None)
    return found


def _blocks(model: nn.Module) -> list[str]:
    """The repeated blocks of a transformer, and what stands beside them."""
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
    """These modules' outputs in order of execution, then every trained parameter's gradient; on the CPU."""
    values: Values = {}
    with recording(model, modules, values), torch.random.fork_rng(cuda_devices(model)):
        found = _gradients(losses().mean(), dict(model.named_parameters()))
    return values | gradients({name: grad.cpu().clone() for name, grad in found.items()})


def _gradients(loss: torch.Tensor, parameters: Mapping[str, nn.Parameter]) -> Values:
    """By name; the parameters' own `grad` stays as it was."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not any(isinstance(parameter, DTensor) for parameter in trained.values()):
        # Past the hooks on accumulated gradients: within DDP's forward they would be its step's.
        found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        pairs = zip(trained, found, strict=True)
        return {name: gradient for name, gradient in pairs if gradient is not None}
    kept = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        loss.backward()
        return {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = kept[name]
