"""OpenDiT's video DiT (VDiT) as a Diffusers model: adaLN-zero blocks over all tokens of a video at once.

Each token attends to every other, in space and time. Latte alternates between the two, and is part of Diffusers.
Source: NUS-HPC-AI-Lab/OpenDiT v1.0.0, opendit/models/dit.py; blocks and initialization of DiT, arXiv 2212.09748.

Shapes: B batch, C latent channels, F latent frames, H and W latent size, N tokens, D width.
"""

from functools import lru_cache
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import (
    TimestepEmbedding,
    Timesteps,
    get_1d_sincos_pos_embed_from_grid,
    get_2d_sincos_pos_embed_from_grid,
)
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn
from torch.nn import functional

from dit_lora.errors import DitLoraError

TIME_FREQUENCIES = 256  # DiT's frequency_embedding_size


class ModulatedNorm(nn.Module):
    """LayerNorm without weights, then `x * (1 + scale) + shift`. Computed in fp32 and rounded once.

    OpenDiT v1.0.0 modulates in half precision (opendit/modules/block.py); its v0.0.1 did so in fp32.
    """

    eps = 1e-6

    def forward(self, tokens_BND: torch.Tensor, shift_BD: torch.Tensor, scale_BD: torch.Tensor) -> torch.Tensor:
        # (B, D) -> (B, 1, D), the same for every token.
        normed = functional.layer_norm(tokens_BND.float(), tokens_BND.shape[-1:], eps=self.eps)
        modulated = normed * (1 + scale_BD[:, None].float()) + shift_BD[:, None].float()
        return modulated.to(tokens_BND.dtype)


class AdaLayerNorm(nn.Module):
    """Linear map of the condition (B, D) to `parts` vectors (B, D): the shifts, scales and gates of a block."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(width, parts * width)

    def forward(self, condition: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # (B, parts * D) -> `parts` tensors (B, D)
        return self.linear(functional.silu(condition)).chunk(self.parts, dim=1)


class VideoDiTBlock(nn.Module):
    """Attention over all tokens and an MLP, each modulated and gated by the condition (adaLN-zero)."""

    def __init__(self, width: int, heads: int, head_dim: int, mlp_ratio: float) -> None:
        super().__init__()
        # Shift, scale and gate, for attention and for the MLP.
        self.adaln = AdaLayerNorm(width, 6)
        self.norm1 = ModulatedNorm()
        self.attn = Attention(query_dim=width, heads=heads, dim_head=head_dim, bias=True)
        self.norm2 = ModulatedNorm()
        self.ff = FeedForward(width, inner_dim=int(width * mlp_ratio), activation_fn="gelu-approximate")

    def forward(self, tokens_BND: torch.Tensor, condition_BD: torch.Tensor) -> torch.Tensor:
        shift_attn, scale_attn, gate_attn, shift_ff, scale_ff, gate_ff = self.adaln(condition_BD)
        # (B, D) -> (B, 1, D), to gate every token.
        attended = self.attn(self.norm1(tokens_BND, shift_attn, scale_attn))
        tokens_BND = tokens_BND + gate_attn[:, None] * attended
        return tokens_BND + gate_ff[:, None] * self.ff(self.norm2(tokens_BND, shift_ff, scale_ff))


class VideoPatchEmbed(nn.Module):
    """Embeds patches of (frames, height, width) as tokens (B, N, D), ordered by frame, then row, then column."""

    def __init__(self, in_channels: int, width: int, patch: tuple[int, int, int]) -> None:
        super().__init__()
        self.proj = nn.Conv3d(in_channels, width, kernel_size=patch, stride=patch)

    def forward(self, latents_BCFHW: torch.Tensor) -> torch.Tensor:
        tokens = self.proj(latents_BCFHW)
        positions = sincos_positions(tokens.shape[1], *tokens.shape[2:], tokens.device)
        # (B, D, f, h, w) -> (B, N, D). Positions are added in fp32, and the sum is rounded once.
        return (tokens.flatten(2).transpose(1, 2).float() + positions).to(tokens.dtype)


class VideoDiTTransformer3DModel(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """VDiT, conditioned either on a class (`num_classes`) or on a pooled text vector (`text_dim`).

    `sample_*` is the latent shape that the model was trained on. Positions are sines of the token indices, so other
    shapes work too. With out_channels = 2 * in_channels the second half is the learned variance of iDDPM. Class index
    `num_classes` is the null class, for guidance and label dropout. Label dropout happens in the trainer: the model
    draws no random numbers.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ("VideoDiTBlock",)

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 16,
        attention_head_dim: int = 72,
        in_channels: int = 4,
        out_channels: int = 8,
        num_layers: int = 28,
        mlp_ratio: float = 4.0,
        sample_frames: int = 16,
        sample_height: int = 32,
        sample_width: int = 32,
        patch_size: int = 2,
        patch_size_t: int = 1,
        num_classes: int | None = None,
        text_dim: int | None = None,
    ) -> None:
        super().__init__()
        width = num_attention_heads * attention_head_dim
        if (num_classes is None) == (text_dim is None):
            raise DitLoraError(
                "a video DiT is conditioned on classes or on text: give num_classes or text_dim; "
                f"got num_classes={num_classes}, text_dim={text_dim}"
            )
        if width % 4:
            raise DitLoraError(
                f"sincos positions need a width that is a multiple of 4; got {num_attention_heads} heads "
                f"of {attention_head_dim}"
            )
        self.width, self.out_channels = width, out_channels
        self.patch = (patch_size_t, patch_size, patch_size)
        self.patch_embed = VideoPatchEmbed(in_channels, width, self.patch)
        # Cosine first and frequencies 10000^(-i/128), as DiT; Diffusers' DiT divides by 127.
        self.time_proj = Timesteps(TIME_FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time_embed = TimestepEmbedding(TIME_FREQUENCIES, width)
        # One more row than there are classes, for the null class.
        self.class_embed = None if num_classes is None else nn.Embedding(num_classes + 1, width)
        self.text_embed = None if text_dim is None else nn.Linear(text_dim, width)
        self.transformer_blocks = nn.ModuleList(
            VideoDiTBlock(width, num_attention_heads, attention_head_dim, mlp_ratio) for _ in range(num_layers)
        )
        self.norm_out = ModulatedNorm()
        self.adaln_out = AdaLayerNorm(width, 2)
        self.proj_out = nn.Linear(width, patch_size_t * patch_size**2 * out_channels)
        self.gradient_checkpointing = False
        self.initialize_weights()

    def initialize_weights(self) -> None:
        """Initialize a video DiT as DiT does: Xavier, and zeros for the gates of each block and the output layer."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Attention):
                for part in (module.to_q, module.to_k, module.to_v):
                    # DiT initializes the three as one matrix, whose fan-out is three times as large.
                    nn.init.xavier_uniform_(part.weight, gain=0.5**0.5)
        # DiT initializes this convolution as a linear layer over a flattened patch.
        nn.init.xavier_uniform_(self.patch_embed.proj.weight.flatten(1))
        nn.init.zeros_(self.patch_embed.proj.bias)  # type: ignore[arg-type]
        if self.class_embed is not None:
            nn.init.normal_(self.class_embed.weight, std=0.02)
        nn.init.normal_(self.time_embed.linear_1.weight, std=0.02)
        nn.init.normal_(self.time_embed.linear_2.weight, std=0.02)
        adaln = [module for module in self.modules() if isinstance(module, AdaLayerNorm)]
        # adaLN-zero: with zero gates every block starts as the identity.
        for zeroed in [*(module.linear for module in adaln), self.proj_out]:
            nn.init.zeros_(zeroed.weight)
            nn.init.zeros_(zeroed.bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        class_labels: torch.Tensor | None = None,
        pooled_projections: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """Predict (B, out_channels, F, H, W) from `hidden_states` (B, C, F, H, W) and `timestep` (B,).

        Give `class_labels`, int64 (B,), or `pooled_projections` (B, text_dim), depending on the model.

        Raises:
            DitLoraError: Both or neither condition, or a latent size that is not a multiple of the patch size.
        """
        condition = self._embed_condition(timestep, class_labels, pooled_projections)
        grid = self._patch_grid(hidden_states)
        tokens = self.patch_embed(hidden_states)
        for block in self.transformer_blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                tokens = self._gradient_checkpointing_func(block, tokens, condition)
            else:
                tokens = block(tokens, condition)
        # Output tokens hold the values of one patch: (B, N, r * p * q * C).
        tokens = self.proj_out(self.norm_out(tokens, *self.adaln_out(condition)))
        sample = self._unpatchify(tokens, grid)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _embed_condition(
        self, timestep: torch.Tensor, class_labels: torch.Tensor | None, pooled_projections: torch.Tensor | None
    ) -> torch.Tensor:
        """Embedding (B, D) of the timestep plus that of the class or text."""
        # `Timesteps` always returns fp32.
        frequencies = self.time_proj(timestep).to(self.time_embed.linear_1.weight.dtype)
        embedded = self.time_embed(frequencies)
        conditions: dict[str, Any] = {"class_labels": class_labels, "pooled_projections": pooled_projections}
        required = "class_labels" if self.class_embed is not None else "pooled_projections"
        if [name for name, value in conditions.items() if value is not None] != [required]:
            raise DitLoraError(f"this video DiT is conditioned on {required} and nothing else")
        # The constructor makes exactly one of the two.
        embed = self.class_embed if self.class_embed is not None else self.text_embed
        assert embed is not None
        return embedded + embed(conditions[required])

    def _patch_grid(self, latents: torch.Tensor) -> tuple[int, int, int]:
        sizes = tuple(latents.shape[2:])
        if len(sizes) != 3 or any(size % step for size, step in zip(sizes, self.patch, strict=True)):
            raise DitLoraError(
                f"latents of shape {tuple(latents.shape)} do not divide into patches of {self.patch} "
                "(frames, height, width)"
            )
        frames, height, width = (size // step for size, step in zip(sizes, self.patch, strict=True))
        return frames, height, width

    def _unpatchify(self, tokens: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """Assemble tokens (B, N, .) to a video (B, C, F, H, W)."""
        patches = tokens.reshape(len(tokens), *grid, *self.patch, self.out_channels)
        # (B, f, h, w, r, p, q, C) -> (B, C, f, r, h, p, w, q)
        video = patches.permute(0, 7, 1, 4, 2, 5, 3, 6)
        # Join from the last axis on, so that the earlier ones keep their numbers.
        return video.flatten(6, 7).flatten(4, 5).flatten(2, 3)


@lru_cache(maxsize=8)
def sincos_positions(width: int, frames: int, height: int, columns: int, device: torch.device) -> torch.Tensor:
    """Sinusoidal position embedding, spatial plus temporal, fp32 (frames * height * columns, width).

    Computed in fp64 from the token indices, as OpenDiT's two tables for a square video. Not a buffer of the model, so
    that casting the model does not round them.
    """
    # A table made in inference mode and cached could not be used in training.
    with torch.inference_mode(False):
        table = temporal_sines(width, frames)[:, None] + spatial_sines(width, height, columns)[None]
        return table.flatten(0, 1).float().to(device)


def spatial_sines(width: int, height: int, columns: int) -> torch.Tensor:
    """Sinusoidal position table of one frame, fp64 (height * columns, width).

    The first half of the channels encodes the column, as in MAE.
    """
    row = torch.arange(height, dtype=torch.float64, device="cpu")
    column = torch.arange(columns, dtype=torch.float64, device="cpu")
    # (2, height, columns): columns first, because the function encodes the first grid in the first half.
    grid = torch.stack(torch.meshgrid(column, row, indexing="xy"))
    return get_2d_sincos_pos_embed_from_grid(width, grid)


def temporal_sines(width: int, frames: int) -> torch.Tensor:
    """Sinusoidal position table over time, fp64 (frames, width)."""
    time = torch.arange(frames, dtype=torch.float64, device="cpu")
    return get_1d_sincos_pos_embed_from_grid(width, time)
