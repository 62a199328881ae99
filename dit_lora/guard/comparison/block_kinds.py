"""Find blocks of a model that are identical for a kernel, so that only one of each kind has to be compared."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dit_lora.guard.comparison.block_parity import find_blocks, hook_blocks

BlockInputs = dict[str, list[Hashable]]
"""Descriptions of each block's inputs, by the block's name."""


@contextmanager
def record_block_inputs(model: nn.Module) -> Iterator[BlockInputs]:
    """Record each block's inputs during training forward passes: shapes, dtypes, and which require a gradient."""
    calls: BlockInputs = {}

    def record(name: str, _block: nn.Module, args: Any, kwargs: Any) -> None:
        # A block may be called several times in a step, so keep a list.
        leaves = tree_leaves((args, kwargs))
        calls.setdefault(name, []).append(tuple(_describe_leaf(leaf) for leaf in leaves))

    with hook_blocks(model, find_blocks(model), record):
        yield calls


def select_block_per_kind(
    model: nn.Module,
    names: Sequence[str],
    calls: Mapping[str, Sequence[Hashable]],
    fused_ops: Collection[tuple[str, str]],
) -> list[str]:
    """Select one block of each kind, in order: the last, whose inputs are the largest.

    Blocks are of one kind if they agree in class, submodules, weights, buffers, settings, inputs and the positions of
    fused ops. `fused_ops` holds these positions as pairs of an op and a module.
    """
    last_of_kind: dict[Hashable, str] = {}
    for name in names:
        block = model.get_submodule(name)
        path = f"{name}." if name else ""
        # Paths relative to the block, so that equal blocks have equal keys.
        ops = tuple(sorted((op, m[len(path) :]) for op, m in fused_ops if f"{m}.".startswith(path)))
        called = tuple(calls.get(name, ()))
        # A later block of the same kind replaces an earlier one.
        last_of_kind[(_describe_structure(block), ops, called)] = name
    return [name for name in names if name in last_of_kind.values()]


def _describe_leaf(leaf: object) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    # Plain values may change what the block computes; of other objects only the type is compared.
    return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else str(type(leaf))


def _describe_structure(block: nn.Module) -> Hashable:
    modules: list[Hashable] = []
    for name, module in block.named_modules():
        # Plain attributes, such as an eps or a window size. A layer's index does not make it another kind of block.
        plain = ((k, v) for k, v in vars(module).items() if isinstance(v, bool | int | float | str | None))
        settings = sorted((key, value) for key, value in plain if not key.endswith("_idx"))
        modules.append((name, type(module), tuple(settings)))
    weights: list[Hashable] = []
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        weights.append((name, tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad))
    return tuple(modules), tuple(weights)
