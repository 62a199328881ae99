"""What a block keeps for its backward pass, stock and fused, at its real width.

    python -m benchmarks.activations [--rank 64] [--blocks NAME ...]

Random weights in bf16, fp32 adapters on q, k, v and the output of every attention, bf16 autocast. The figure is the
growth with the number of tokens, from two numbers of them, in units of one bf16 activation of the block's width.
Weights, casts of adapters, tables and text do not grow. Autograd's hooks count, so the device only matters for
what autocast does: a CPU's leaves norms in bf16, a GPU's makes them fp32 and the stock block keeps more.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import peft
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock
from diffusers.models.transformers.transformer_flux2 import (
    Flux2SingleTransformerBlock,
    Flux2TransformerBlock,
)
from diffusers.models.transformers.transformer_krea2 import Krea2TransformerBlock
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_sana_video import (
    SanaVideoTransformerBlock,
    WanRotaryPosEmbed,
)
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from torch import nn
from torch.utils._pytree import tree_leaves

from dit_lora.errors import DitLoraError
from dit_lora.families.sana.attention import keep_linear_attention_fp32
from dit_lora.fuse.api import fuse
from dit_lora.fuse.patches import OPS
from dit_lora.numerics.opaque import COUNTS_ONLY

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
JOINT_TARGETS = ["to_qkv_mlp_proj", "attn.to_out"]
"""The layers of a block whose attention has its feed-forward's layers in its own."""
Arguments = Callable[[int], tuple[Sequence[Any], int]]
"""By the number of frames (or images): a block's arguments, and the elements of one activation."""


class Model(nn.Module):
    """Something that has one block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([block])


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def cogvideox() -> tuple[nn.Module, Arguments]:
    block = CogVideoXBlock(
        dim=3072,
        num_attention_heads=48,
        attention_head_dim=64,
        time_embed_dim=512,
        attention_bias=True,
    )

    def make_inputs(frames: int) -> tuple[Sequence[Any], int]:
        rotary = get_3d_rotary_pos_embed(64, ((0, 0), (16, 16)), (16, 16), temporal_size=frames)
        video, text = noise(1, frames * 256, 3072), noise(1, 26, 3072)
        return (video, text, noise(1, 512), rotary), video.numel()

    return block, make_inputs


def sana() -> tuple[nn.Module, Arguments]:
    def make_inputs(images: int) -> tuple[Sequence[Any], int]:
        text, mask = noise(images, 30, 2240), torch.zeros(images, 1, 30).bfloat16()
        x = noise(images, 256, 2240)
        return (x, None, text, mask, noise(images, 6 * 2240), 16, 16), x.numel()

    return SanaTransformerBlock(), make_inputs


def sana_video() -> tuple[nn.Module, Arguments]:
    def make_inputs(frames: int) -> tuple[Sequence[Any], int]:
        text, mask = noise(1, 30, 2240), torch.zeros(1, 1, 30).bfloat16()
        rotary = WanRotaryPosEmbed(112, (1, 1, 1), 1024)(torch.zeros(1, 4, frames, 16, 16))
        x, time = noise(1, frames * 256, 2240), noise(1, 1, 6 * 2240)
        return (x, None, text, mask, time, frames, 16, 16, rotary), x.numel()

    return SanaVideoTransformerBlock(), make_inputs


def dit() -> tuple[nn.Module, Arguments]:
    block = BasicTransformerBlock(
        1152,
        16,
        72,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        attention_bias=True,
        norm_elementwise_affine=False,
        norm_type="ada_norm_zero",
    )

    def make_inputs(images: int) -> tuple[Sequence[Any], int]:
        x, numbers = noise(images, 256, 1152), torch.arange(images)
        return (x, None, None, None, numbers, None, numbers), x.numel()

    return block, make_inputs


def wan() -> tuple[nn.Module, Arguments]:
    block = WanTransformerBlock(1536, 8960, 12, "rms_norm_across_heads", cross_attn_norm=True)

    def make_inputs(frames: int) -> tuple[Sequence[Any], int]:
        text, time = noise(1, 32, 1536), noise(1, 6, 1536, dtype=torch.float32)
        angles = torch.randn(1, frames * 256, 1, 64).repeat_interleave(2, -1)
        x = noise(1, frames * 256, 1536)
        return (x, text, time, (angles.cos(), angles.sin())), x.numel()

    return block, make_inputs


def flux2_double() -> tuple[nn.Module, Arguments]:
    def make_inputs(images: int) -> tuple[Sequence[Any], int]:
        x, text = noise(images, 256, 4096), noise(images, 512, 4096)
        angles = torch.randn(768, 64).repeat_interleave(2, -1)
        modulations = [noise(images, 6 * 4096) for _ in "it"]
        return (x, text, *modulations, (angles.cos(), angles.sin())), x.numel() + text.numel()

    return Flux2TransformerBlock(4096, 32, 128), make_inputs


def flux2_single() -> tuple[nn.Module, Arguments]:
    def make_inputs(images: int) -> tuple[Sequence[Any], int]:
        x, angles = noise(images, 768, 4096), torch.randn(768, 64).repeat_interleave(2, -1)
        return (x, None, noise(images, 3 * 4096), (angles.cos(), angles.sin())), x.numel()

    return Flux2SingleTransformerBlock(4096, 32, 128), make_inputs


def qwen_image() -> tuple[nn.Module, Arguments]:
    def make_inputs(images: int) -> tuple[Sequence[Any], int]:
        x, text = noise(images, 256, 3072), noise(images, 26, 3072)
        angles = [torch.polar(torch.ones(n, 64), torch.randn(n, 64)) for n in (256, 26)]
        return (x, text, None, noise(images, 3072), angles), x.numel() + text.numel()

    return QwenImageTransformerBlock(3072, 24, 128), make_inputs


def krea2() -> tuple[nn.Module, Arguments]:
    def make_inputs(images: int) -> tuple[Sequence[Any], int]:
        x, angles = noise(images, 768, 6144), torch.randn(768, 64).repeat_interleave(2, -1)
        return (x, noise(images, 1, 6 * 6144), (angles.cos(), angles.sin())), x.numel()

    return Krea2TransformerBlock(6144, 16384, 48, 12, 1e-5), make_inputs


def z_image() -> tuple[nn.Module, Arguments]:
    def make_inputs(images: int) -> tuple[Sequence[Any], int]:
        x, angles = noise(images, 256, 3840), torch.randn(1, 256, 64)
        rotations = torch.polar(torch.ones_like(angles), angles)
        return (x, None, rotations, noise(images, 256)), x.numel()

    return ZImageTransformerBlock(0, 3840, 30, 30, 1e-5, qk_norm=True), make_inputs


def ltx2() -> tuple[nn.Module, Arguments]:
    """LTX-2.3's, as it trains without sound: one token of that, and neither attends to the other."""
    widths = (4096, 2048)
    block = LTX2VideoTransformerBlock(
        *(4096, 32, 128, 4096, 2048, 32, 64, 2048),
        video_gated_attn=True,
        video_cross_attn_adaln=True,
        audio_gated_attn=True,
        audio_cross_attn_adaln=True,
        rope_type="split",
        perturbed_attn=True,
    )

    def rotary(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.randn(1, 32, tokens, half)
        return angles.cos(), angles.sin()

    def make_inputs(frames: int) -> tuple[Sequence[Any], int]:
        x = noise(1, frames * 256, 4096)
        text = [noise(1, 26, width) for width in widths]
        rows = [noise(1, 1, count * width) for count in (9, 4, 1, 2) for width in widths]
        rotations = [rotary(x.shape[1], 64), rotary(1, 32), None, None]
        masks_and_use = [None] * 6 + [False, False]
        return (x, noise(1, 1, 2048), *text, *rows, *rotations, *masks_and_use), x.numel()

    return block, make_inputs


BLOCKS: dict[str, Callable[[], tuple[nn.Module, Arguments]]] = {
    "CogVideoX-5B": cogvideox,
    "Sana-1.6B": sana,
    "SANA-Video": sana_video,
    "DiT-XL/2": dit,
    "Wan2.1-1.3B": wan,
    "FLUX.2 klein 9B, double": flux2_double,
    "FLUX.2 klein 9B, single": flux2_single,
    "Krea 2": krea2,
    "LTX-2.3, video alone": ltx2,
    "Z-Image": z_image,
    "Qwen-Image": qwen_image,
}


def count_saved_bytes(run: Callable[[], Any], excluded: Sequence[torch.Tensor]) -> int:
    """Bytes that autograd keeps after `run()`, each storage once."""
    other_storages = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    storage_bytes: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage_bytes.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    setattr(pack, COUNTS_ONLY, True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _result = run()  # alive, so that no address is used twice
    return sum(t.untyped_storage().nbytes() for key, t in storage_bytes.items() if key not in other_storages)


def fused(model: nn.Module) -> nn.Module:
    """Every op that the block takes is on, on any machine."""
    fused_parts = {}
    for op in OPS:
        try:
            fuse(model, {**dict.fromkeys(OPS, "off"), op: "on"}, check=False)
            fused_parts[op] = "on"
        except DitLoraError:
            fused_parts[op] = "off"
    fuse(model, fused_parts, check=False)
    return model


def measure(make: Callable[[], tuple[nn.Module, Arguments]], rank: int) -> tuple[float, float]:
    """Units that the block keeps, stock and fused."""
    torch.manual_seed(0)
    block, arguments = make()
    model = Model(block).requires_grad_(False).bfloat16()
    targets = JOINT_TARGETS if isinstance(block, Flux2SingleTransformerBlock) else TARGETS
    config = peft.LoraConfig(r=rank, target_modules=targets, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if isinstance(block, SanaTransformerBlock | SanaVideoTransformerBlock):
        keep_linear_attention_fp32(model, should_saturate=False)  # as recipes do

    def units() -> float:
        sizes = []
        for frames in (1, 3):
            inputs, elements = arguments(frames)
            inputs[0].requires_grad_()
            tables = [t for t in tree_leaves(inputs[1:]) if isinstance(t, torch.Tensor)]
            with torch.autocast("cpu", torch.bfloat16):
                saved_bytes = count_saved_bytes(partial(block, *inputs), [*model.parameters(), *tables])
            sizes.append((saved_bytes, elements))
        (few_units, small), (many_units, large) = sizes
        return (many_units - few_units) / (2 * (large - small))

    stock = units()
    fused(model)
    return stock, units()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS), metavar="NAME")
    arguments = parser.parse_args(argv)
    print(f"rank {arguments.rank}\n\n| block | stock | fused | ratio |\n|---|---:|---:|---:|")
    for name in arguments.blocks:
        stock, ours = measure(BLOCKS[name], arguments.rank)
        print(f"| {name} | {stock:.1f} | {ours:.1f} | {ours / stock:.2f} |", flush=True)


if __name__ == "__main__":
    main()
