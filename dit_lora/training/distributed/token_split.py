"""Context parallelism: a sample's tokens split over ranks with Diffusers' hooks and Ulysses attention.

Each rank runs the blocks on its share of text and video tokens. Attention exchanges them, so that each rank sees all
tokens for its share of the heads (DeepSpeed-Ulysses, arXiv 2309.14509). Diffusers has plans for Flux, LTX, Qwen-Image,
Wan and others. The plan for CogVideoX is here, because its attention processor calls PyTorch without the dispatcher.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from diffusers.models._modeling_parallel import (
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    ParallelConfig,
)
from torch.distributed.device_mesh import init_device_mesh

from dit_lora.errors import DitLoraError, format_list
from dit_lora.fuse.models.cogvideox import CogVideoXProcessor


def _build_context_parallel_plan(model: Any) -> dict[str, Any]:
    """CogVideoX's context-parallel plan.

    It splits both streams and the positions before the first block, and gathers after the last layer.
    """
    # Hooks on the first block's inputs split the embeddings of whole samples; every later block sees a share.
    tokens = ContextParallelInput(split_dim=1, expected_dims=3)
    plan: dict[str, Any] = {
        "transformer_blocks.0": {"hidden_states": tokens, "encoder_hidden_states": tokens},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }
    # Rotary tables (tokens, D) have no batch dimension: they are split along the first.
    if model.config.use_rotary_positional_embeddings:
        positions = ContextParallelInput(split_dim=0, expected_dims=2)
        plan[""] = {"image_rotary_emb": [positions, positions]}
    return plan


TOKEN_EXCHANGE_BACKENDS = ("native", "flash", "_native_flash", "_native_cudnn")
"""Diffusers' attention backends that train and exchange tokens."""


def has_context_plan(model: Any) -> bool:
    """True if a plan for splitting this model's tokens exists."""
    return type(model).__name__ == "CogVideoXTransformer3DModel"


def find_context_problems(model: Any, degree: int, tokens: Iterable[tuple[int, int]]) -> list[str]:
    """Reasons why `degree` ranks cannot share samples with these numbers of (text, video) tokens.

    Empty if they can.
    """
    problems = []
    # In attention each rank has all tokens of its share of heads; elsewhere all heads of its share of tokens.
    heads = model.config.num_attention_heads
    if heads % degree:
        problems.append(f"its {heads} attention heads cannot be divided by {degree}")
    for text, video in sorted(set(tokens)):
        if text % degree or video % degree:
            problems.append(f"{text} text and {video} video tokens cannot be divided by {degree}")
    return problems


def enable_token_split(model: Any, degree: int, device: torch.device, rank: int, num_ranks: int) -> None:
    """Let each `degree` consecutive ranks share every sample that they run together. Collective; needs a fused model.

    Raises `DitLoraError` if an attention processor would attend only to its own rank's tokens.
    """
    unsupported = {type(p).__name__ for p in _find_processors(model) if not isinstance(p, CogVideoXProcessor)}
    if unsupported:
        summary = "train.context_parallel: these attention processors do not exchange tokens"
        raise DitLoraError(format_list(summary, sorted(unsupported)))
    # The steps of Diffusers' `enable_parallelism`, which requires an accelerator.
    # Data parallel groups of `degree` ranks each; no ring attention.
    mesh = init_device_mesh(device.type, (num_ranks // degree, 1, degree), mesh_dim_names=("data", "ring", "ulysses"))
    # Ulysses: ranks exchange tokens for heads before attention, and back after it.
    context = ContextParallelConfig(ulysses_degree=degree, mesh=mesh)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(rank, num_ranks, device, mesh=mesh)
    _apply_token_split(model, config)


@contextmanager
def disable_token_split(model: Any) -> Iterator[None]:
    """Context in which tokens are not split over ranks: this rank computes all tokens and exchanges nothing."""
    config = getattr(model, "_parallel_config", None)
    if config is None:
        yield
        return
    remove_context_parallel(model, _build_context_parallel_plan(model))
    _set_parallel_config(model, None)
    try:
        yield
    finally:
        _apply_token_split(model, config)


def _apply_token_split(model: Any, config: Any) -> None:
    """Register Diffusers' hooks that split and gather tokens, and give the processors the parallel configuration."""
    _set_parallel_config(model, config)
    apply_context_parallel(model, config.context_parallel_config, _build_context_parallel_plan(model))


def _set_parallel_config(model: Any, config: ParallelConfig | None) -> None:
    """Set the parallel configuration where Diffusers reads it: on the model and on each attention processor."""
    model._parallel_config = config
    for processor in _find_processors(model):
        processor._parallel_config = config


def _find_processors(model: Any) -> list[Any]:
    return [m.processor for m in model.modules() if hasattr(m, "processor")]
