"""The models of `benchmarks.step`: random weights at the sizes of published configs, and random batches."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    DiTTransformer2DModel,
    SanaTransformer2DModel,
    WanTransformer3DModel,
)
from diffusers.models.embeddings import LabelEmbedding, get_3d_rotary_pos_embed

from dit_lora.adapters.attach import attach_lora, is_lora_b
from dit_lora.config.recipe import LoraConfig

CONFIGS = Path(__file__).parents[1] / "tests" / "fixtures" / "configs"
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")

Inputs = dict[str, Any]


class Draws:
    """Random tensors of one step, the same for every setting."""

    def __init__(self, step: int, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(step)

    def normal(self, *size: int) -> torch.Tensor:
        values = torch.randn(size, generator=self._generator, device=self.device)
        return values.to(torch.bfloat16)

    def integers(self, high: int, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size, generator=self._generator, device=self.device)


@dataclass(frozen=True)
class Model:
    """How one transformer is built and called."""

    kind: Any
    config: Mapping[str, Any]
    inputs: Callable[[Draws], Inputs]
    shape: str
    ops: tuple[str, ...]
    """Kernels that it takes; on a CPU they run as their references."""
    rank: int = 64
    channels_at: int = 1
    """The dimension of the output that holds its channels."""

    def build(self, device: torch.device) -> Any:
        """On the device, in bf16 with fp32 adapters, frozen but for them; B is not zero, so that A has gradients."""
        torch.manual_seed(0)
        with torch.device(device):
            model = self.kind.from_config(dict(self.config))
        model.requires_grad_(False)
        fp32_names = set(model._keep_in_fp32_modules or ())
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and not fp32_names & set(name.split(".")):
                tensor.data = tensor.data.to(torch.bfloat16)
        attach_lora(model, LoraConfig(rank=self.rank), TARGETS, seed=0)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if is_lora_b(name):
                values = 0.02 * torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(values)
        model.train()
        for module in model.modules():
            if isinstance(module, LabelEmbedding):
                module.dropout_prob = 0.0  # otherwise each block drops labels at random
        return model


def published(name: str) -> dict[str, Any]:
    """A fixture's config of the transformer."""
    return json.loads((CONFIGS / name / "transformer" / "config.json").read_text())


def _cogvideox(config: Mapping[str, Any], frames: int, height: int, width: int) -> Callable[[Draws], Inputs]:
    """Latents of a clip, a caption, a timestep and, where the model takes them, tables of rotations."""
    patch, patch_t = config["patch_size"], config.get("patch_size_t")
    grid, tables = (height // patch, width // patch), {}
    size = (config["sample_height"] // patch, config["sample_width"] // patch)
    if patch_t is None:
        rotary_kwargs: dict[str, Any] = {"crops_coords": ((0, 0), grid), "temporal_size": frames}
    else:
        rotary_kwargs = {
            "crops_coords": None,
            "temporal_size": frames // patch_t,
            "grid_type": "slice",
        }
        rotary_kwargs |= {"max_size": size}

    def inputs(draws: Draws) -> Inputs:
        inputs: Inputs = {
            "hidden_states": draws.normal(1, frames, config["in_channels"], height, width),
            "encoder_hidden_states": draws.normal(1, config["max_text_seq_length"], config["text_embed_dim"]),
            "timestep": draws.integers(1000, 1),
        }
        if config["use_rotary_positional_embeddings"]:
            if draws.device not in tables:
                tables[draws.device] = get_3d_rotary_pos_embed(
                    embed_dim=config["attention_head_dim"], grid_size=grid, device=draws.device, **rotary_kwargs
                )  # fmt: skip
            inputs["image_rotary_emb"] = tables[draws.device]
        return inputs

    return inputs


def _sana(config: Mapping[str, Any], batch: int, text: int) -> Callable[[Draws], Inputs]:
    side, channels = config["sample_size"], config["in_channels"]

    def inputs(draws: Draws) -> Inputs:
        return {
            "hidden_states": draws.normal(batch, channels, side, side),
            "encoder_hidden_states": draws.normal(batch, text, config["caption_channels"]),
            "encoder_attention_mask": _captions(draws, batch, text),
            "timestep": draws.integers(1000, batch),
        }

    return inputs


def _captions(draws: Draws, batch: int, text: int) -> torch.Tensor:
    """Mask (B, T) of captions that fill 1/15 to 2/3 of the tokens. A mask of ones may be dropped."""
    lengths = text // 15 + 1 + draws.integers(text * 3 // 5, batch, 1)
    return (torch.arange(text, device=draws.device) < lengths).float()


def _dit(batch: int) -> Callable[[Draws], Inputs]:
    def inputs(draws: Draws) -> Inputs:
        return {
            "hidden_states": draws.normal(batch, 4, 32, 32),
            "timestep": draws.integers(1000, batch),
            "class_labels": draws.integers(1000, batch),
        }

    return inputs


def _wan(draws: Draws) -> Inputs:
    return {
        "hidden_states": draws.normal(1, 16, 21, 60, 104),
        "encoder_hidden_states": draws.normal(1, 512, 4096),
        "timestep": draws.integers(1000, 1),
    }


_TINY_COGVIDEOX = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 64,
    "text_embed_dim": 32,
    "num_layers": 1,
    "patch_size": 2,
    "sample_width": 12,
    "sample_height": 8,
    "sample_frames": 9,
    "max_text_seq_length": 16,
    "use_rotary_positional_embeddings": True,
}
_TINY_SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "num_layers": 1,
    "num_cross_attention_heads": 3,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 48,
    "caption_channels": 24,
    "sample_size": 8,
}
_JOINT = ("lora_linear", "qk_norm_rope", "ada_norm")
_LINEAR = ("lora_linear", "ada_norm", "relu_linear_attention", "silu_dwconv_glu")


def _cogvideox_model(name: str, frames: int, height: int, width: int, shape: str, rank: int = 64) -> Model:
    config = published(name)
    inputs = _cogvideox(config, frames, height, width)
    return Model(CogVideoXTransformer3DModel, config, inputs, shape, _JOINT, rank, channels_at=2)


def _sana_model(batch: int) -> Model:
    config = published("Sana_1600M_1024px_BF16_diffusers")
    inputs = _sana(config, batch, 300)
    return Model(SanaTransformer2DModel, config, inputs, f"{batch} x 1024x1024", _LINEAR)


def _dit_model(batch: int) -> Model:
    ops = ("lora_linear", "ada_norm")
    config = published("DiT-XL-2-256")
    return Model(DiTTransformer2DModel, config, _dit(batch), f"{batch} x 256x256", ops)


def _real() -> dict[str, Model]:
    # Diffusers' defaults are those of 14B.
    wan = {
        "num_attention_heads": 12,
        "attention_head_dim": 128,
        "ffn_dim": 8960,
        "num_layers": 30,
    }
    return {
        # The rank of the published example: diffusers, examples/cogvideo/README.md.
        "cogvideox-5b": _cogvideox_model("CogVideoX-5b", 13, 60, 90, "1 x 49x480x720", 128),
        "sana-1.6b-b8": _sana_model(8),
        "dit-xl2-b32": _dit_model(32),
        "sana-1.6b-b4": _sana_model(4),
        "dit-xl2-b64": _dit_model(64),
        "cogvideox-2b": _cogvideox_model("CogVideoX-2b", 13, 60, 90, "1 x 49x480x720"),
        "wan-1.3b": Model(WanTransformer3DModel, wan, _wan, "1 x 81x480x832", _JOINT),
        # 21 frames of latents, and one of padding for patches of two.
        "cogvideox-1.5": _cogvideox_model("CogVideoX1.5-5B", 22, 96, 170, "1 x 81x768x1360"),
    }


MODELS: dict[str, Model] = _real()
"""In the order in which a short run takes them: the most telling first."""
TINY: dict[str, Model] = {
    "tiny-cogvideox": Model(
        CogVideoXTransformer3DModel, _TINY_COGVIDEOX, _cogvideox(_TINY_COGVIDEOX, 3, 8, 12), "1 x 9x64x96",
        _JOINT, rank=4, channels_at=2,
    ),
    "tiny-sana": Model(
        SanaTransformer2DModel, _TINY_SANA, _sana(_TINY_SANA, 2, 7), "2 x 256x256", _LINEAR, rank=4
    ),
}  # fmt: skip
