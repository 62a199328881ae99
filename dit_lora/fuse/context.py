"""Context parallelism: the tokens of a sample spread over ranks, by Diffusers' hooks and Ulysses attention.

Each rank runs the blocks on its share of text and video tokens; attention exchanges them, so that it sees all tokens for a
share of the heads (DeepSpeed-Ulysses, arXiv 2309.14509). Diffusers has plans for Flux, LTX, Qwen-Image, Wan and others;
CogVideoX's is here, because its stock attention processor calls PyTorch past the dispatcher.
"""

from collections.abc import Callable, Iterable, Iterator
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

from dit_lora.errors import DitLoraError, listed
from dit_lora.fuse.cogvideox import CogVideoXProcessor

Plan = dict[str, Any]


def _cogvideox(model: Any) -> Plan:
    """Both streams in front of the blocks, positions with the video's; whole again behind the output layer."""
    tokens = ContextParallelInput(split_dim=1, expected_dims=3)
    plan: dict[str, Any] = {
        "transformer_blocks.0": {"hidden_states": tokens, "encoder_hidden_states": tokens},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }
    if model.config.use_rotary_positional_embeddings:
        positions = ContextParallelInput(split_dim=0, expected_dims=2)
        plan[""] = {"image_rotary_emb": [positions, positions]}
    return plan


_PLANS: dict[str, tuple[type, Callable[[Any], Plan]]] = {
    "CogVideoXTransformer3DModel": (CogVideoXProcessor, _cogvideox)
}
BACKENDS = ("native", "flash", "_native_flash", "_native_cudnn")
"""Of Diffusers' attention backends that train, those that exchange tokens."""


def has_context_plan(model: Any) -> bool:
    """Whether it is known how this model's tokens are split."""
    return type(model).__name__ in _PLANS


def context_problems(model: Any, degree: int, tokens: Iterable[tuple[int, int]]) -> list[str]:
    """Why `degree` ranks cannot share this model's samples, of which `tokens` gives text and video tokens."""
    problems = []
    heads = model.config.num_attention_heads
    if heads % degree:
        problems.append(f"its {heads} attention heads cannot be shared by {degree}")
    for text, video in sorted(set(tokens)):
        if text % degree or video % degree:
            problems.append(f"{text} text and {video} video tokens cannot be shared by {degree}")
    return problems


def split_context(model: Any, degree: int, device: torch.device, rank: int, ranks: int) -> None:
    """Let each `degree` consecutive ranks share every sample that they run together; collective.

    For a fused model. Diffusers' `enable_parallelism` does the same, and needs an accelerator for it.
    """
    processor, _ = _PLANS[type(model).__name__]
    others = {type(one).__name__ for one in _processors(model) if not isinstance(one, processor)}
    if others:
        summary = "train.context_parallel: these attention processors do not exchange tokens"
        raise DitLoraError(listed(summary, sorted(others)))
    mesh = init_device_mesh(
        device.type, (ranks // degree, 1, degree), mesh_dim_names=("data", "ring", "ulysses")
    )
    context = ContextParallelConfig(ulysses_degree=degree, mesh=mesh)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(rank, ranks, device, mesh=mesh)
    _apply(model, config)


@contextmanager
def whole_context(model: Any) -> Iterator[None]:
    """Within it a forward pass exchanges nothing: this rank runs all tokens of its samples, as without the split."""
    config = getattr(model, "_parallel_config", None)
    if config is None:
        yield
        return
    _, plan = _PLANS[type(model).__name__]
    remove_context_parallel(model, plan(model))
    _configure(model, None)
    try:
        yield
    finally:
        _apply(model, config)


def _apply(model: Any, config: Any) -> None:
    _, plan = _PLANS[type(model).__name__]
    _configure(model, config)
    apply_context_parallel(model, config.context_parallel_config, plan(model))


def _configure(model: Any, config: ParallelConfig | None) -> None:
    model._parallel_config = config
    for processor in _processors(model):
        processor._parallel_config = config


def _processors(model: Any) -> list[Any]:
    return [m.processor for m in model.modules() if hasattr(m, "processor")]
