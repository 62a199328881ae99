"""Quantises a model's base and puts kernels in, as a recipe says; for both kinds of tasks."""

import importlib.util

from torch import nn

from dit_lora.adapters.groups import Patterns, base_members
from dit_lora.adapters.quantize import quantize_base
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.fuse.api import fuse
from dit_lora.fuse.attention import refuse_masks
from dit_lora.fuse.registry import WITHOUT_TRITON


def require_quantization(recipe: Recipe) -> None:
    """Raise `DitLoraError` where this machine lacks what `model.quantize` needs."""
    if recipe.model.quantize == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise DitLoraError(
            "model.quantize=nf4: bitsandbytes is not installed; pip install 'dit-lora[bitsandbytes]', or take "
            "int8 or fp8, which do without"
        )


def quantized(recipe: Recipe, model: nn.Module, patterns: Patterns) -> str:
    """Quantise the base as `model.quantize` says, except weights that train. Returns a line about it, or ""."""
    kind = recipe.model.quantize
    if kind is None:
        return ""
    return f"{quantize_base(model, kind, base_members(model, recipe.optim.groups, patterns))}\n"


def put_kernels(recipe: Recipe, transformer: nn.Module) -> str:
    """Put the recipe's kernels in, and return lines that say which; preflight compares them."""
    ops = recipe.kernels.ops()
    # A Triton kernel that nobody has compared is not put in by `auto`; by name it is.
    unchecked = [op for op, mode in ops.items() if mode == "auto" and op not in WITHOUT_TRITON]
    if not recipe.guard.preflight:
        ops |= dict.fromkeys(unchecked, "off")
    attention = recipe.kernels.attention
    # Now, and not at the first batch whose captions do not fill their mask.
    if get_family(recipe.model.family).masked_attention:
        refuse_masks(attention)
    if attention == "auto" and recipe.train.context_parallel > 1:
        attention = "native"  # tokens are exchanged by Diffusers' dispatcher, past which PyTorch would be called
    report = str(fuse(transformer, ops, attention=attention, check=False))
    if not recipe.guard.preflight:
        report += (
            f"\nkernels: {', '.join(unchecked)}: off: guard.preflight, which compares them, is off"
        )
    return report
