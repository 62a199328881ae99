"""Whether a fused kernel computes what its reference does: on the user's own model, shapes and samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from dit_lora.numerics.replay import cuda_devices
from dit_lora.numerics.shards import is_sharded, local, needs_all_ranks, whole
from dit_lora.numerics.switches import Switch, in_fp32
from dit_lora.numerics.tolerances import GRADIENT, KERNEL, OUTPUT
from dit_lora.numerics.whole import called_modules

# Of the largest gradient in the same block: a gradient that is exactly zero (a key's bias) has rounding errors alone.
_FLOOR = 0.05


@dataclass(frozen=True)
class Difference:
    """The first place where a kernel and its reference part."""

    switch: str
    module: str
    """In order of execution; or the parameter whose gradient differs."""
    error: float
    """Root mean square of the difference over that of the reference, of the worst sample; NaN if one is not finite."""

    @property
    def words(self) -> str:
        return f"kernel {self.switch} differs from its reference at {self.module} (relative error {self.error:.2g})"


Losses = Callable[[], torch.Tensor]
"""Runs the model on the same inputs at each call; losses by sample, (B,)."""


def first_difference(switch: Switch, losses: Losses, model: nn.Module) -> Difference | None:
    """Where outputs or gradients with the kernel differ from those without it; None if nowhere.

    Give losses of several different samples: OpenDiT's fused modulation used the first sample's scale and shift
    for all of them, and was right for a batch of one. A model in half precision is compared as it is, and in fp32
    too, which tells a small wrong from rounding, if a second copy of its weights fits. Outputs of whole blocks are
    compared first, in host memory; those inside the first block that differs then say where. A sharded model
    (FSDP2) is compared on all ranks at once, as it is alone.
    """
    found = _located(switch, losses, model)
    halves = any(p.dtype in _HALVES for p in model.parameters())
    if found is not None or not halves or switch.cause == "attention_backend" or is_sharded(model):
        return found  # flash attention has no fp32
    try:
        with in_fp32(model):
            return _located(switch, losses, model)
    except torch.OutOfMemoryError:
        return None


def differences(
    switches: Sequence[Switch], compare: Callable[[Switch], Difference | None]
) -> Iterator[tuple[Switch, Difference]]:
    """Every switch whose kernels differ; its parts one by one only where a whole differs.

    Switch off what is yielded before asking for the next: then the whole is asked once more.
    """
    for switch in switches:
        if switch.part_of is not None:
            continue
        found = compare(switch)
        parts = [part for part in switches if part.part_of == switch.name]
        if found is not None and parts:
            for part in parts:
                difference = compare(part)
                if difference is not None:
                    yield part, difference
            found = compare(switch)
        if found is not None:
            yield switch, found


def _located(switch: Switch, losses: Losses, model: nn.Module) -> Difference | None:
    found = _compare(switch, losses, model, _blocks(model))
    if found is None or found.module.startswith(_GRADIENT):
        return found
    block = found.module.partition(" ")[0]
    inside = [name for name, _ in called_modules(model) if name.startswith(f"{block}.")]
    return _compare(switch, losses, model, inside) or found


_HALVES = (torch.bfloat16, torch.float16)
_GRADIENT = "the gradient of "
Values = dict[str, torch.Tensor]


def _compare(
    switch: Switch, losses: Losses, model: nn.Module, modules: Sequence[str]
) -> Difference | None:
    with _stirred(model), _without_dropout(model):
        with switch.off():
            references = _values(losses, model, modules)
        fused = _values(losses, model, modules)
    found = _first_apart(switch, references, fused)
    if needs_all_ranks(model):  # one answer for all ranks, so that none goes on alone
        return next((one for one in gather_object([found]) if one is not None), None)
    return found


def _first_apart(switch: Switch, references: Values, fused: Values) -> Difference | None:
    # Computed in, whatever a value is kept in: gradients of fp32 adapters, norms under autocast.
    lowest = max((x.dtype for x in references.values()), key=lambda dtype: OUTPUT.get(dtype, 0))
    largest = _largest_gradients(references)
    for name, expected in references.items():  # outputs in order of execution, then gradients
        # A module that the kernel takes the place of, or that is called with its heads in another order.
        if name not in fused or fused[name].shape != expected.shape:
            continue
        if not torch.isfinite(expected).all():
            continue  # what the stock model makes NaN of shows nothing
        is_gradient = name.startswith(_GRADIENT)
        floor = _FLOOR * largest[_block_of(name)] if is_gradient else 0.0
        error = _error(fused[name], expected, floor)
        limit = (GRADIENT if is_gradient else OUTPUT).get(lowest, KERNEL)
        if not error <= limit:  # NaN differs too
            return Difference(switch.name, name, error)
    return None


def _block_of(name: str) -> str:
    """`transformer_blocks.3` of any parameter in it; the first part of other names."""
    parts = name.removeprefix(_GRADIENT).split(".")
    return ".".join(parts[: 2 if len(parts) > 1 and parts[1].isdigit() else 1])


def _largest_gradients(values: Values) -> dict[str, float]:
    """Root mean square of the largest gradient of each block."""
    largest: dict[str, float] = {}
    for name, value in values.items():
        if name.startswith(_GRADIENT):
            size = value.float().square().mean().sqrt().item()
            largest[_block_of(name)] = max(size, largest.get(_block_of(name), 0.0))
    return largest


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """A mask depends on the dtype that it is drawn for, which is a kernel's own choice."""
    # Those that drop nothing stay: a compiled block would be compiled anew for another mode.
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.training and m.p]
    for module in dropouts:
        module.eval()
    try:
        yield
    finally:
        for module in dropouts:
            module.train()


@contextmanager
def _stirred(model: nn.Module) -> Iterator[None]:
    """Within it, trained base weights that are all zero are random: exactly zero again afterwards.

    A fresh DiT's modulations are zero for every sample, so a kernel that mixes samples up would be as right
    as its reference until the weights have moved. Adapters start at zero on trained weights, which tell.
    """
    generator = torch.Generator().manual_seed(0)
    own = [
        local(parameter.detach())  # of sharded weights (FSDP2), this rank's
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".lora_" not in name
    ]
    zero = [values for values in own if not values.any()]
    for values in zero:
        # The embeddings that these layers see are small, and the differences must not be.
        scale = 1.0 if values.ndim > 1 else 0.1
        values.copy_(scale * torch.randn(values.shape, generator=generator))
    try:
        yield
    finally:
        for values in zero:
            values.zero_()


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
    with _recording(model, modules, values), torch.random.fork_rng(cuda_devices(model)):
        gradients = _gradients(losses().mean(), dict(model.named_parameters()))
    return values | {f"{_GRADIENT}{n}": grad.cpu().clone() for n, grad in gradients.items()}


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


@contextmanager
def _recording(model: nn.Module, modules: Sequence[str], values: Values) -> Iterator[None]:
    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
            for index, tensor in enumerate(tensors):
                key = f"{name} (output {index})" if index else name
                values.setdefault(key, tensor.detach().cpu().clone())

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _error(value: torch.Tensor, reference: torch.Tensor, floor: float) -> float:
    """Of the worst row of the first dimension: an average over the batch would hide one bad sample."""
    if not reference.numel():
        return 0.0
    # A parameter's rows are no samples.
    start = 1 if floor == 0.0 and reference.ndim > 1 else 0
    difference = (value.float() - reference.float()).flatten(start).square().mean(-1).sqrt()
    size = reference.float().flatten(start).square().mean(-1).sqrt()
    return (difference / size.clamp(min=max(floor, 1e-6))).max().item()
