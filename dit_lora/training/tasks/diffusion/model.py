"""Quantises a model's base and patches in kernels, as the recipe says; for both kinds of tasks."""

import importlib.util
from dataclasses import replace

import torch
from torch import nn

from dit_lora.adapters.groups import GroupPatterns, find_base_members
from dit_lora.adapters.quantize import quantize_base
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.fuse.api import fuse
from dit_lora.fuse.attention import require_mask_support
from dit_lora.fuse.registry import OPS_WITHOUT_TRITON
from dit_lora.training.distributed.token_split import has_context_plan


def require_quantization(recipe: Recipe) -> None:
    """Raise `DitLoraError` if this machine lacks a package that `model.quantize` needs."""
    if recipe.model.quantize == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise DitLoraError(
            "model.quantize=nf4 needs bitsandbytes; pip install 'dit-lora[bitsandbytes]', or use int8 or fp8"
        )


def quantize_if_requested(recipe: Recipe, model: nn.Module, patterns: GroupPatterns) -> str:
    """Quantise the base according to `model.quantize`, except weights that train. Returns a line about it, or ""."""
    kind = recipe.model.quantize
    if kind is None:
        return ""
    return f"{quantize_base(model, kind, find_base_members(model, recipe.optim.groups, patterns))}\n"


def patch_kernels(recipe: Recipe, transformer: nn.Module) -> str:
    """Patch in the recipe's kernels; returns lines about them for the log. Preflight compares them later.

    Without a GPU there is none, unless the recipe sets a kernel to `on` or names an attention backend.
    """
    ops = recipe.kernels.get_op_modes()
    # Without preflight nobody compares the Triton kernels: `auto` leaves them out, a kernel set to `on` is used.
    unchecked = [op for op, mode in ops.items() if mode == "auto" and op not in OPS_WITHOUT_TRITON]
    if not recipe.guard.preflight:
        ops |= dict.fromkeys(unchecked, "off")
    attention = recipe.kernels.attention
    # Raise now, and not at the first batch whose captions do not fill their mask.
    if get_family(recipe.model.family).has_attention_mask:
        require_mask_support(attention)
    # Models that cannot split their tokens are refused later, by that reason and not by their attention.
    if attention == "auto" and recipe.train.context_parallel > 1 and has_context_plan(transformer):
        # Only Diffusers' dispatcher exchanges tokens; `auto` would call PyTorch directly.
        attention = "native"
    report = fuse(transformer, ops, attention=attention, check=False)
    if not torch.cuda.is_available():
        has_request = "on" in ops.values() or recipe.kernels.attention != "auto"
        return str(replace(report, unavailable={})) if has_request else ""
    if not recipe.guard.preflight:
        return f"{report}\nkernels: {', '.join(unchecked)} are off: guard.preflight, which compares them, is off"
    return str(report)
