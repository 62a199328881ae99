"""Weights that FSDP2 shards over ranks (DTensors): local shards, full tensors, and collective checks."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from dit_lora.numerics.ranks import gather_object

DescribeTensor = Callable[[str, torch.Tensor], str | None]
"""Called with a name and its tensor; returns what is wrong with it, or None."""

GATHERING_HOOKS = "_dit_lora_sharding_hooks"
"""Attribute of a sharded module that records which of its hooks all-gather weights."""


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded tensor, sharing its memory; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(model: nn.Module) -> bool:
    """True if this rank holds only a part of the model's weights."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def has_collective_forward(model: nn.Module) -> bool:
    """True if a forward pass is collective.

    That is so if weights are sharded, or a sample's tokens are (Diffusers' context parallelism).
    """
    unwrapped_model = getattr(model, "module", model)  # DDP wraps the model
    return is_sharded(model) or getattr(unwrapped_model, "_parallel_config", None) is not None


def wrap_local_values(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Wrap values of this rank's shard as a tensor that is sharded like `tensor`, sharing their memory.

    Values for a tensor that is not sharded are returned unchanged.
    """
    if not isinstance(tensor, DTensor):
        return values
    # The global shape and stride are taken from the sharded tensor: they cannot be computed from one shard.
    mesh, placements = tensor.device_mesh, tensor.placements
    # Without the check: comparing shapes with other ranks would make this collective.
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def get_original_class(module: nn.Module) -> type:
    """The module's class as its authors wrote it. FSDP2 replaces the class with a subclass of a different name."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one, on every rank; any other tensor unchanged. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def combine_shard_norms(norms: torch.Tensor) -> torch.Tensor:
    """Norms of whole parameters from the norms of each rank's shards, in fp32. Collective: one all-reduce."""
    # Squares are added, since norms themselves do not add up; in fp64, where they do not overflow.
    squares = norms.double().square()
    distributed.all_reduce(squares)
    return squares.sqrt().float()


def gather_tensors(tensors: Mapping[str, torch.Tensor], *, keep_values: bool) -> dict[str, torch.Tensor]:
    """All tensors unsharded, by name. Collective.

    Sharded ones are gathered one at a time and moved to the CPU. Without `keep_values` they come back without values
    (on `meta`), for ranks that only take part in the gathering.
    """
    gathered = {}
    for name, tensor in tensors.items():
        values = tensor.detach()
        if isinstance(values, DTensor):
            # All ranks take part in the gathering, whether or not they keep the values.
            values = values.full_tensor()
            values = values.cpu() if keep_values else torch.empty_like(values, device="meta")
        gathered[name] = values
    return gathered


def shard_like_reference(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Shard full `values`, which must be equal on all ranks, like the tensor `reference`, on its device. Not
    collective.

    Returns a new tensor in the dtype of `reference`.
    """
    values = values.to(reference.device, reference.dtype)
    if not isinstance(reference, DTensor):
        return values.clone()
    # Without a source rank nothing is sent: each rank takes its shard from its own copy.
    return distribute_tensor(values, reference.device_mesh, reference.placements, src_data_rank=None)


@torch.no_grad()
def copy_full_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy full `values`, which must be equal on all ranks, into a tensor that may be sharded. Not collective."""
    tensor.copy_(shard_like_reference(values, tensor) if isinstance(tensor, DTensor) else values)


def describe_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], describe: DescribeTensor, *, is_collective: bool
) -> dict[str, int]:
    """Call `describe` on each tensor and map each description to the rank whose shard it is about.

    Without `is_collective` only this rank's shards are checked, and every rank in the result is -1. With it the call
    is collective, the result is equal on all ranks, and sharded tensors are described as a whole; only tensors in
    which some rank found something are gathered.
    """
    named = [(name, tensor.detach()) for name, tensor in tensors]
    # Each rank checks its shards first: a healthy model costs one gather of empty lists.
    local_findings = {name: description for name, t in named if (description := describe(name, get_local_tensor(t)))}
    if not is_collective:
        return dict.fromkeys(local_findings.values(), -1)
    # The lowest rank whose shard of a tensor has a finding.
    owners: dict[str, int] = {}
    for rank, names in enumerate(gather_object([list(local_findings)])):
        for name in names:
            owners.setdefault(name, rank)
    # Equal on all ranks: they return together, and none waits in the gathering below.
    if not owners:
        return {}
    # Only tensors in which a rank found something are gathered: all of them would not fit in memory.
    suspected = {name: tensor for name, tensor in named if name in owners}
    descriptions = {name: describe(name, gather_full_tensor(tensor)) for name, tensor in suspected.items()}
    ranks: list[dict[str, str | None]] = gather_object([descriptions])
    # A tensor that is not sharded may be wrong only on its owner: take the owner's description.
    return {description: owners[name] for name in descriptions if (description := ranks[owners[name]][name])}


@contextmanager
def disable_gathering(model: nn.Module) -> Iterator[None]:
    """Disable FSDP2's all-gather hooks inside the context.

    For forward passes on tensors without values (`meta`), or on weights that are already gathered.
    """
    # The dictionaries in which torch keeps a module's hooks, and the keys of FSDP2's hooks in them.
    hooks = [
        (getattr(module, name), keys)
        for module in model.modules()
        for name, keys in module.__dict__.get(GATHERING_HOOKS, {}).items()
    ]
    # Dictionaries keep their order: a hook that is added back alone would run after all others.
    hooks_before = [(registered, dict(registered)) for registered, _ in hooks]
    for registered, keys in hooks:
        for key in keys:
            del registered[key]
    try:
        yield
    finally:
        # In the original order, plus hooks that the pass added.
        for registered, original in hooks_before:
            current = dict(registered)
            registered.clear()
            registered.update(original | current)


@contextmanager
def keep_block_weights_gathered(block: nn.Module) -> Iterator[None]:
    """Keep all weights of a sharded block gathered inside the context, also after a call of the block. Collective."""
    # The block's own weights are gathered already: this runs inside a call of it.
    units = [m for m in block.modules() if isinstance(m, FSDPModule) and m is not block]
    # Gathered here, because the hooks that do it are disabled inside the context.
    for module in units:
        module.unshard()
    try:
        with disable_gathering(block):
            yield
    finally:
        for module in units:
            module.reshard()


_GATHER_ATTRIBUTES = ("param_dtype", "all_gather_outputs", "_unsharded_inner_tensors", "_unsharded_param")
"""Attributes of torch's `FSDPParam`: the dtype that it gathers in, and buffers from the last all-gather."""


@contextmanager
def gather_shards_in_fp32(model: nn.Module, dtypes: Collection[torch.dtype]) -> Iterator[None]:
    """All-gather sharded weights of these dtypes in fp32 inside the context, in the forward and backward pass.

    `MixedPrecisionPolicy(param_dtype=torch.float32)` does this for a whole run, but cannot be set later. A block whose
    weights are gathered already, because the context is entered inside a call of it, is left as it is.
    """
    if not is_sharded(model):
        yield
        return
    # `Any`: the state of an FSDP unit has no public name.
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.reshard()  # weights that are gathered already would not be gathered again
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    # A unit whose parameters are all in inner units has no group.
    weights = [weight for group in groups if group is not None for weight in group.fsdp_params]
    low_precision = [weight for weight in weights if weight.orig_dtype in dtypes]
    # The original attributes, to put back afterwards.
    saved = [
        {name: weight.__dict__.pop(name) for name in _GATHER_ATTRIBUTES if name in weight.__dict__}
        for weight in low_precision
    ]
    for weight in low_precision:
        # Without its old buffers, FSDP2 allocates new ones in the new dtype.
        weight.__dict__.update(param_dtype=torch.float32, all_gather_outputs=[], _unsharded_inner_tensors=[])
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()  # if a pass raised, some weights may still be gathered
        for weight, attributes in zip(low_precision, saved, strict=True):
            # The one in fp32; the original, if there was one, is put back with the other attributes.
            weight.__dict__.pop("_unsharded_param", None)
            weight.__dict__.update(attributes)
