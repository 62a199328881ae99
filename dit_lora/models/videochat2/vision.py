"""UMT's video transformer: every patch of every frame attends to every other (joint space-time attention).

Source: OpenGVLab/Ask-Anything, video_chat2/models/blip2/vit.py (UMT, arXiv 2303.16058; MAE's ViT). Weights have their
original names. Differences: attention is SDPA, so no product of q and k is stored in half precision; positions are
added in fp32 and the sum is rounded once.

Shapes: B batch, F frames, H and W pixels, N tokens (frame after frame, row after row), D width.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer

from dit_lora.errors import DitLoraError

# Pixels and patches per side; vit.py uses get_sinusoid_encoding_table2 for any other size.
PRETRAINED_SIZE, PRETRAINED_SIDE = 224, 14
BLOCK_EPS = 1e-6  # vit.py: norm_layer=partial(nn.LayerNorm, eps=1e-6), with and without `legacy`


class DropPath(nn.Module):
    """Stochastic depth: in training, zeros a sample's branch with probability `rate` and scales the rest up."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return branch
        # Divide by the keep probability, so that the mean stays the same.
        keep = 1 - self.rate
        # (B, 1, ..., 1): one decision per sample.
        shape = (branch.shape[0],) + (1,) * (branch.dim() - 1)
        return branch * (branch.new_empty(shape).bernoulli_(keep) / keep)


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Drop rates of stochastic depth that increase linearly from 0 at the first layer to `rate` at the last.

    As in vit.py and Qformer.py (torch.linspace).
    """
    return torch.linspace(0, rate, depth, device="cpu").tolist()


class VideoChat2VisionAttention(nn.Module):
    """Self-attention with a bias for queries and values but not for keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width))
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(width, width)

    def forward(self, tokens_BND: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(tokens_BND).chunk(3, dim=-1)
        query = query + self.q_bias.to(query.dtype)
        value = value + self.v_bias.to(value.dtype)
        # Each (B, N, D) -> (B, heads, N, D / heads)
        attended = functional.scaled_dot_product_attention(
            *(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value))
        )
        return self.proj(attended.transpose(1, 2).flatten(2))


class VideoChat2VisionMLP(nn.Module):
    """Two linear layers with the exact GELU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens_BND: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.gelu(self.fc1(tokens_BND)))


class VideoChat2VisionBlock(GradientCheckpointingLayer):
    """Pre-norm attention and MLP over all tokens of a video."""

    def __init__(self, width: int, heads: int, mlp_ratio: float, drop_path_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=BLOCK_EPS)
        self.attn = VideoChat2VisionAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=BLOCK_EPS)
        self.mlp = VideoChat2VisionMLP(width, int(width * mlp_ratio))
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, tokens_BND: torch.Tensor) -> torch.Tensor:
        tokens_BND = tokens_BND + self.drop_path(self.attn(self.norm1(tokens_BND)))
        return tokens_BND + self.drop_path(self.mlp(self.norm2(tokens_BND)))


class VideoChat2PatchEmbed(nn.Module):
    """Embeds patches of (tubelet_size, patch_size, patch_size) as tokens (B, N, D), ordered by frame, row, column."""

    def __init__(self, width: int, tubelet_size: int, patch_size: int) -> None:
        super().__init__()
        size = (tubelet_size, patch_size, patch_size)
        self.proj = nn.Conv3d(3, width, kernel_size=size, stride=size)

    def forward(self, pixels_BCFHW: torch.Tensor) -> torch.Tensor:
        # (B, D, f, h, w) -> (B, N, D)
        patches = self.proj(pixels_BCFHW.to(self.proj.weight.dtype))
        return patches.flatten(2).transpose(1, 2)


class VideoChat2VisionEncoder(nn.Module):
    """Pixels (B, F, 3, H, W) to the output (B, N, D) of block num_hidden_layers + return_index + 1, without a norm.

    A single frame is an image and gets the positions of an image. More frames get those of `pretrained_frames`,
    interpolated in time. (The original fixes the number of frames at construction; here it is that of the input.)
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        width, depth = config["hidden_size"], config["num_hidden_layers"]
        self.patch_embed = VideoChat2PatchEmbed(width, config["tubelet_size"], config["patch_size"])
        # The rates are spread over all blocks; those after the returned one are not built.
        rates = drop_path_rates(config["drop_path_rate"], depth)
        rates = rates[: depth + config["return_index"] + 1]
        self.blocks = nn.ModuleList(
            VideoChat2VisionBlock(width, config["num_attention_heads"], config["mlp_ratio"], rate) for rate in rates
        )

    def forward(self, pixels_BFCHW: torch.Tensor) -> torch.Tensor:
        frames, channels, height, width = pixels_BFCHW.shape[1:]
        size, tubelet = self.config["image_size"], self.config["tubelet_size"]
        if (channels, height, width) != (3, size, size) or frames % tubelet:
            raise DitLoraError(
                f"the vision encoder takes frames of 3x{size}x{size} pixels, their number a multiple of {tubelet}; "
                f"got {frames} of {channels}x{height}x{width}"
            )
        # Conv3d takes (B, C, F, H, W).
        tokens = self.patch_embed(pixels_BFCHW.transpose(1, 2))
        # Number of tokens in time.
        times = frames // tubelet
        side = size // self.config["patch_size"]
        positions = build_position_table(
            tokens.shape[-1],
            side,
            times,
            1 if frames == 1 else self.config["pretrained_frames"],
            tokens.device,
            # vit.py only resizes a table of 14 x 14 patches for sizes other than 224.
            pretrained_side=side if size == PRETRAINED_SIZE else PRETRAINED_SIDE,
        )
        tokens = (tokens.float() + positions).to(tokens.dtype)
        for block in self.blocks:
            tokens = block(tokens)
        return tokens


class VideoChat2Vision(nn.Module):
    """Wrapper that gives the encoder its name in the original's checkpoints (`vision_encoder.encoder`)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.encoder = VideoChat2VisionEncoder(config)

    def forward(self, pixels_BFCHW: torch.Tensor) -> torch.Tensor:
        return self.encoder(pixels_BFCHW)


@lru_cache(maxsize=8)
def build_position_table(
    width: int,
    side: int,
    frames: int,
    pretrained_frames: int,
    device: torch.device,
    pretrained_side: int | None = None,
) -> torch.Tensor:
    """Sinusoidal positions, fp32 (frames * side * side, width).

    They encode the flat index over (pretrained_frames, pretrained_side, pretrained_side), resized. Even channels are
    sines, odd channels cosines of `index / 10000^(2 * (channel // 2) / width)`, in fp64. Another size is interpolated
    bicubically, then another number of frames linearly (vit.py: get_sinusoid_encoding_table and _table2). Not a buffer
    of the model, so that casting the model does not round them.

    `pretrained_side` None means `side`.
    """
    pretrained_side = pretrained_side or side
    # A table made in inference mode and cached could not be used in training.
    with torch.inference_mode(False):
        channel = torch.arange(width, dtype=torch.float64, device="cpu")
        count = pretrained_frames * pretrained_side**2
        index = torch.arange(count, dtype=torch.float64, device="cpu")
        angle = index[:, None] / 10000 ** (2 * (channel // 2) / width)
        table = torch.where(channel % 2 == 0, angle.sin(), angle.cos()).float()
        # (frames * N, D) -> (frames, D, rows, columns) for interpolate, and back.
        if side != pretrained_side:
            pictures = table.unflatten(0, (pretrained_frames, pretrained_side, pretrained_side))
            resized = functional.interpolate(
                pictures.permute(0, 3, 1, 2), size=(side, side), mode="bicubic", align_corners=False
            )
            table = resized.permute(0, 2, 3, 1).flatten(0, 2)
        if frames != pretrained_frames:
            # (frames * N, D) -> (N, D, frames), because interpolate resizes the last side.
            series = table.unflatten(0, (pretrained_frames, -1)).permute(1, 2, 0)
            table = functional.interpolate(series, size=frames, mode="linear")
            table = table.permute(2, 0, 1).flatten(0, 1)
        return table.to(device)
