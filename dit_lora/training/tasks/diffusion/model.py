"""Loads the transformer that a recipe trains, and sets what of it trains."""

import importlib.util
from typing import Any

import torch
from torch import nn

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import Patterns, base_members, recipe_groups
from dit_lora.adapters.quantize import quantize_base
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Denoiser
from dit_lora.families.family import DiffusionFamily
from dit_lora.fuse.api import fuse
from dit_lora.fuse.registry import WITHOUT_TRITON
from dit_lora.numerics.saturation import FP16_MAX, is_emulated
from dit_lora.numerics.streams import fold


def load_trainable(
    recipe: Recipe, family: DiffusionFamily, checkpoint: Denoiser, dtype: torch.dtype
) -> tuple[nn.Module, list[dict[str, Any]], str]:
    """Return transformer, parameter groups, and lines that say what was attached; equal on all ranks.

    In mode `lora` base weights are in `dtype` and what trains is fp32; in mode `full` everything is fp32.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(recipe.train.seed, "weights"))  # model.from_scratch draws them
        full = recipe.train.mode == "full"
        transformer = checkpoint.load_transformer(torch.float32 if full else dtype)
    report = "full: every weight trains, in fp32"
    if not full:
        # Before the adapter is attached: PEFT wraps the quantised layers as they are.
        narrowed = quantized(recipe, transformer, family.group_patterns)
        attached = attach_lora(
            transformer, recipe.lora, family.lora_targets, seed=recipe.train.seed
        )
        report = f"{narrowed}{attached}"
    if is_emulated(transformer):
        report += (
            f"\nsaturation: attention is clamped at +-{FP16_MAX:g} as in fp16, in which this "
            "checkpoint was trained"
        )
    groups = recipe_groups(
        transformer, recipe.optim.groups, family.group_patterns, recipe.train.mode
    )
    return transformer, groups, f"{report}\n{put_kernels(recipe, transformer)}"


def require_quantization(recipe: Recipe) -> None:
    """Raise `DitLoraError` where this machine lacks what `model.quantize` needs."""
    if recipe.model.quantize == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise DitLoraError(
            "model.quantize=nf4: bitsandbytes is not installed; pip install 'dit-lora[bitsandbytes]', or take "
            "int8 or fp8, which do without"
        )


def quantized(recipe: Recipe, model: nn.Module, patterns: Patterns) -> str:
    """Quantise the base as `model.quantize` says, without what `optim.groups` trains; return a line about it, or ""."""
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
    if attention == "auto" and recipe.train.context_parallel > 1:
        attention = "native"  # tokens are exchanged by Diffusers' dispatcher, past which PyTorch would be called
    report = str(fuse(transformer, ops, attention=attention, check=False))
    if not recipe.guard.preflight:
        report += (
            f"\nkernels: {', '.join(unchecked)}: off: guard.preflight, which compares them, is off"
        )
    return report
