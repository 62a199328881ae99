"""Timesteps of the attention between LTX-2's video and sound.

In the vendor's model, scale and shift of that attention depend on the timesteps of the modality's own tokens, and its
gate on the other modality's noise level (Lightricks/LTX-2, ltx-core, transformer_args.py,
`_prepare_cross_attention_timestep`, since 28 May 2026; ComfyUI does the same). Diffusers 0.42.1 with
`use_cross_timestep=True` takes the other modality's noise level for all three. Both agree when the two noise levels
are equal and no token is conditioned; in training they differ.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import nn

# The module that embeds a modality's timesteps, and the one that computes its cross-attention modulation.
_SCALE_SHIFT_BY_EMBEDDING = {
    "time_embed": "av_cross_attn_video_scale_shift",
    "audio_time_embed": "av_cross_attn_audio_scale_shift",
}


@contextmanager
def use_modality_timesteps(transformer: nn.Module) -> Iterator[None]:
    """Context in which scale and shift of the cross-modal attention use the timesteps of the modality's tokens.

    The gate keeps the other modality's noise level; the call must pass `use_cross_timestep=True`.

    Args:
        transformer: The LTX-2 transformer, also inside DDP or another wrapper with a `module`.
    """
    model: Any = transformer
    # Unwrap DDP and similar wrappers.
    while not _is_transformer(model):
        model = model.module
    own_timesteps: dict[str, torch.Tensor] = {}

    def make_record_hook(embedding: str) -> Any:
        def record_timestep(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            # The first argument is the timesteps.
            own_timesteps[embedding] = args[0]

        return record_timestep

    def make_replace_hook(embedding: str) -> Any:
        def replace_timestep(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (own_timesteps[embedding], *args[1:])

        return replace_timestep

    handles = []
    for embedding, scale_shift in _SCALE_SHIFT_BY_EMBEDDING.items():
        # The forward embeds the modality's own timesteps, flattened, before it computes the modulation.
        handles.append(model.get_submodule(embedding).register_forward_pre_hook(make_record_hook(embedding)))
        handles.append(model.get_submodule(scale_shift).register_forward_pre_hook(make_replace_hook(embedding)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_transformer(module: Any) -> bool:
    return isinstance(module, LTX2VideoTransformer3DModel)
