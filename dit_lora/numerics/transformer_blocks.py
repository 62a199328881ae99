"""Finds the repeated blocks of a transformer, which are checkpointed, offloaded and compiled one by one."""

from collections.abc import Sequence

from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

WHOLE_BLOCK_LAUNCHES = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
"""Launches in which every rank has whole blocks and calls them directly."""


def repeated_blocks(transformer: nn.Module) -> list[nn.Module]:
    """A model's blocks that gradient checkpointing calls one by one, ordered by name.

    For Transformers' models these are the `GradientCheckpointingLayer`s; for Diffusers' and ours the members of the
    model's own `ModuleList`s. A list inside another module is not checkpointed.
    """
    if isinstance(transformer, PreTrainedModel):
        return [m for m in transformer.modules() if isinstance(m, GradientCheckpointingLayer)]
    # Direct children only, as gradient checkpointing expects.
    lists = [child for child in transformer.children() if isinstance(child, nn.ModuleList)]
    return [block for blocks in lists for block in blocks]


def find_weights_read_outside(transformer: nn.Module, directly_called_modules: Sequence[str]) -> set[nn.Parameter]:
    """Parameters of blocks that the model also reads outside of the blocks: those of its `directly_called_modules`."""
    return {p for name in directly_called_modules for p in transformer.get_submodule(name).parameters()}
