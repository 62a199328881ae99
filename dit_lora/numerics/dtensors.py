"""Weights that FSDP2 spreads over ranks (DTensors): a rank's part of them, the whole, and what ranks say together."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from dit_lora.numerics.ranks import gather_object

Describe = Callable[[str, torch.Tensor], str | None]
"""Says what is wrong with the tensor of a name, or None."""

GATHERING = "_dit_lora_sharding_hooks"
"""Attribute in which a sharded module notes which of its hooks gather weights."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, sharing its memory; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(model: nn.Module) -> bool:
    """Return True if a rank has only a part of the model's weights."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def needs_all_ranks(model: nn.Module) -> bool:
    """Return True if a forward pass does: weights are sharded, or a sample's tokens (Diffusers' context
    parallelism).
    """
    bare = getattr(model, "module", model)  # in DDP
    return is_sharded(model) or getattr(bare, "_parallel_config", None) is not None


def as_part_of(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return values beside this rank's part of a sharded tensor as a tensor sharded like it, sharing their memory."""
    if not isinstance(tensor, DTensor):
        return values
    mesh, placements = tensor.device_mesh, tensor.placements
    # Without the check: comparing shapes with other ranks would make this collective.
    return DTensor.from_local(
        values, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def stock_class(module: nn.Module) -> type:
    """Return the module's class as its authors wrote it: sharding gives it another, with a name of its own."""
    return next(one for one in type(module).__mro__ if not issubclass(one, FSDPModule))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a sharded tensor, on every rank; any other as it is. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Mapping[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the tensors whole, sharded ones on the CPU; where not `keep`, those without values (meta). Collective.

    One tensor at a time is whole on the device.
    """
    return {name: _gathered(tensor.detach(), keep=keep) for name, tensor in tensors.items()}


def _gathered(tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    values = tensor.full_tensor()
    return values.cpu() if keep else torch.empty_like(values, device="meta")


def spread(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return whole values, equal on all ranks, as a new tensor spread as `like` is and on its device. Not
    collective.
    """
    values = values.to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return values.clone()
    # Without a source rank nothing is sent: each rank cuts its part out of what all of them have.
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Put whole values, equal on all ranks, into a tensor that may be sharded. Not collective."""
    tensor.copy_(spread(values, tensor) if isinstance(tensor, DTensor) else values)


def described(
    tensors: Iterable[tuple[str, torch.Tensor]], describe: Describe, *, together: bool
) -> dict[str, int]:
    """Return what `describe` says of each tensor, in order, with the rank that has it in its part.

    Without `together` it is about this rank's parts, and the ranks are all -1. With it, it is collective, equal on
    all ranks and of sharded tensors as a whole; only what a rank finds wrong is gathered.
    """
    named = [(name, tensor.detach()) for name, tensor in tensors]
    # Each rank looks at its parts first: a healthy model costs one gather of empty lists.
    own_words = {name: words for name, t in named if (words := describe(name, local(t)))}
    if not together:
        return dict.fromkeys(own_words.values(), -1)
    owners: dict[str, int] = {}
    for rank, names in enumerate(gather_object([list(own_words)])):
        for name in names:
            owners.setdefault(name, rank)
    if not owners:
        return {}
    # Whole are only those in which a rank found something: all of them would not fit.
    suspected = {name: tensor for name, tensor in named if name in owners}
    descriptions = {name: describe(name, whole(tensor)) for name, tensor in suspected.items()}
    ranks: list[dict[str, str | None]] = gather_object([descriptions])
    # What is not sharded is wrong on its owner alone.
    return {words: owners[name] for name in descriptions if (words := ranks[owners[name]][name])}


@contextmanager
def without_gathering(model: nn.Module) -> Iterator[None]:
    """Gather no weights in a forward pass within: it is on tensors without values, or on weights that are whole."""
    hooks = [
        (getattr(module, name), keys)
        for module in model.modules()
        for name, keys in module.__dict__.get(GATHERING, {}).items()
    ]
    hooks_before = [(registered, dict(registered)) for registered, _ in hooks]
    for registered, keys in hooks:
        for key in keys:
            del registered[key]
    try:
        yield
    finally:
        for registered, before in hooks_before:  # in their order, with what the pass has added
            now = dict(registered)
            registered.clear()
            registered.update(before | now)


@contextmanager
def gathered_here(block: nn.Module) -> Iterator[None]:
    """Hold all weights of a sharded block whole on every rank within, also after a call of it. Collective."""
    # The block's own weights are gathered: this is inside a call of it.
    apart = [m for m in block.modules() if isinstance(m, FSDPModule) and m is not block]
    for module in apart:
        module.unshard()
    try:
        with without_gathering(block):
            yield
    finally:
        for module in apart:
            module.reshard()


_GATHERED = ("param_dtype", "all_gather_outputs", "_unsharded_inner_tensors", "_unsharded_param")
"""Attributes of torch's `FSDPParam`: the dtype that it gathers in, and what it keeps of the last time."""


@contextmanager
def gathered_in_fp32(model: nn.Module, dtypes: Collection[torch.dtype]) -> Iterator[None]:
    """Gather sharded weights of these dtypes in fp32 within, in the forward and in the backward pass.

    `MixedPrecisionPolicy(param_dtype=torch.float32)` does this for a whole run; it cannot be set later. A block whose
    weights are whole, as inside a call of it, is left as it is.
    """
    if not is_sharded(model):
        yield
        return
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.reshard()  # what is whole already would not be gathered
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    weights = [weight for group in groups if group is not None for weight in group.fsdp_params]
    narrow = [weight for weight in weights if weight.orig_dtype in dtypes]
    kept = [
        {name: weight.__dict__.pop(name) for name in _GATHERED if name in weight.__dict__}
        for weight in narrow
    ]
    for weight in narrow:
        # Without buffers of before, FSDP2 makes new ones.
        weight.__dict__.update(
            param_dtype=torch.float32, all_gather_outputs=[], _unsharded_inner_tensors=[]
        )
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()  # where a pass raised, some may be whole still
        for weight, attributes in zip(narrow, kept, strict=True):
            weight.__dict__.pop("_unsharded_param", None)
            weight.__dict__.update(attributes)
