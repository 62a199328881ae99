"""Converts OpenDiT's VDiT checkpoints, by tensor name, to `VideoDiTTransformer3DModel`.

Names are those that OpenDiT v1.0.0 saves (opendit/models/dit.py). Every tensor is converted, left out, or compared
with the values it is computed from; any other tensor is an error.
"""

import re
from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any

import torch

from dit_lora.errors import DitLoraError, format_list
from dit_lora.models.video_dit import VideoDiTTransformer3DModel, spatial_sines, temporal_sines

Tensors = dict[str, torch.Tensor]

CLIP_PREFIX = "y_embedder.text_encoder.transformer."
# OpenDiT's module to ours; each has a weight and, but for the label table, a bias.
_TOP_LEVEL_NAMES = {
    "x_embedder.proj": "patch_embed.proj",
    "t_embedder.mlp.0": "time_embed.linear_1",
    "t_embedder.mlp.2": "time_embed.linear_2",
    "y_embedder.embedding_table": "class_embed",
    "y_embedder.output_projection": "text_embed",
    "final_layer.adaLN_modulation.1": "adaln_out.linear",
    "final_layer.linear": "proj_out",
}
# Names inside of a block. The fused qkv is split and has no entry.
_BLOCK_NAMES = {
    "adaLN_modulation.1": "adaln.linear",
    "attn.proj": "attn.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
}
# The model's sizes follow from the shapes of these tensors, and the number of heads from the width: VDiT-S to -XL.
_SIZE_TENSORS = (
    "x_embedder.proj.weight",
    "pos_embed_spatial",
    "pos_embed_temporal",
    "blocks.0.mlp.fc1.weight",
    "final_layer.linear.weight",
)
_CONDITION_TENSORS = ("y_embedder.output_projection.weight", "y_embedder.embedding_table.weight")
# VDiT-S, -B, -L and -XL: heads by width.
_HEADS_BY_WIDTH = {384: 6, 768: 12, 1024: 16, 1152: 16}
# Parts of attn.qkv, in the order of its rows.
_QKV_NAMES = ("attn.to_q", "attn.to_k", "attn.to_v")
# Matches the tensors of a block: its number, the module's name inside it, and weight or bias.
_BLOCK_TENSOR = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")


def convert_opendit(state_dict: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Tensors:
    """Convert an OpenDiT VDiT state dict to that of `VideoDiTTransformer3DModel.from_config(config)`.

    Dtypes stay. The fused qkv is split by rows: queries, keys, values. Left out are the text encoder, CLIP, which
    OpenDiT never trains, and position tables, which the model computes; the tables are compared.

    Raises:
        DitLoraError: Lists every tensor that is unknown, missing, of another shape or not finite, and position tables
            for another video size.
    """
    # Only names and shapes of the model are needed.
    with torch.device("meta"):
        model = VideoDiTTransformer3DModel.from_config(dict(config))
    converted: Tensors = {}
    problems: list[str] = []
    for name, tensor in state_dict.items():
        # OpenDiT saves the frozen text encoder with its model.
        if name.startswith(CLIP_PREFIX):
            continue
        if name in ("pos_embed_spatial", "pos_embed_temporal"):
            problems += _position_table_errors(name, tensor, model)
        else:
            parts = dict(_convert_tensor(name, tensor))
            if not parts:
                problems.append(f"{name}: VDiT has no such tensor")
            converted |= parts
    # Compare in both directions: tensors that the model lacks, and those that the file lacks.
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    problems += [f"{name}: missing" for name in expected if name not in converted]
    problems += [
        f"{name}: {'not of this model' if name not in expected else 'shape'}; "
        f"got {tuple(tensor.shape)}, the config makes {tuple(expected.get(name, ()))}"
        for name, tensor in converted.items()
        if tensor.shape != expected.get(name)
    ]
    # A diverged run may have saved NaN or Inf.
    for name, tensor in converted.items():
        count = int((~tensor.isfinite()).sum())
        if count:
            problems.append(f"{name}: {count} of {tensor.numel()} values are not finite")
    if problems:
        raise DitLoraError(format_list("this is not an OpenDiT VDiT of that config", problems))
    return converted


def infer_opendit_config(state_dict: Mapping[str, torch.Tensor], heads: int | None = None) -> dict[str, Any]:
    """The model config for a VDiT state dict, inferred from its tensors' shapes.

    Args:
        state_dict: The state dict.
        heads: Number of attention heads, which the shapes do not tell. None: as in OpenDiT's model of this width
            (S, B, L or XL).

    Raises:
        DitLoraError: A tensor that determines a size is missing, or the width is none of OpenDiT's.
    """
    missing = [name for name in _SIZE_TENSORS if name not in state_dict]
    if not any(name in state_dict for name in _CONDITION_TENSORS):
        missing.append(" or ".join(_CONDITION_TENSORS))
    if missing:
        message = (
            "this is not a state dict of OpenDiT's video model (VDiT, v1.0.0); its image model, DiT, is not supported"
        )
        raise DitLoraError(format_list(f"{message}; it lacks", missing))
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    # (D, C, t, p, p), (1, N, D), (1, F, D), (M, D) and (t * p * p * C, D)
    kernel, spatial, temporal, fc1, proj_out = (shapes[name] for name in _SIZE_TENSORS)
    # Check the numbers of dimensions before unpacking the shapes.
    if [len(shapes[name]) for name in _SIZE_TENSORS] != [5, 3, 3, 2, 2]:
        received = [f"{name}: {shapes[name]}" for name in _SIZE_TENSORS]
        message = "this is not a state dict of OpenDiT's video model; got tensors of these shapes"
        raise DitLoraError(format_list(message, received))
    width, channels, patch_t, patch, _ = kernel
    heads = heads or _HEADS_BY_WIDTH.get(width)
    if heads is None:
        raise DitLoraError(
            f"its width of {width} is none of OpenDiT's ({', '.join(map(str, _HEADS_BY_WIDTH))}), and its tensors "
            "do not say how many attention heads share it; give --heads"
        )
    if width % heads:
        raise DitLoraError(f"--heads {heads} does not divide its width of {width}")
    # One of the two is None: a model is conditioned on text or on classes.
    text, classes = (shapes.get(name) for name in _CONDITION_TENSORS)
    # The spatial table is that of a square, side / patch tokens in each direction.
    side = isqrt(spatial[1]) * patch
    blocks = {match[1] for match in map(_BLOCK_TENSOR.fullmatch, shapes) if match}
    return {
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "in_channels": channels,
        "out_channels": proj_out[0] // (patch_t * patch * patch),
        "num_layers": len(blocks),
        "mlp_ratio": fc1[0] / width,
        "sample_frames": temporal[1] * patch_t,
        "sample_height": side,
        "sample_width": side,
        "patch_size": patch,
        "patch_size_t": patch_t,
        # The label table has one row more than there are classes, for the null class.
        **({"text_dim": text[1]} if text else {"num_classes": classes[0] - 1 if classes else 0}),
    }


def _convert_tensor(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield VideoDiTTransformer3DModel's names and tensors for one OpenDiT tensor; nothing for an unknown name."""
    # `kind` is weight or bias.
    module, _, kind = name.rpartition(".")
    if module in _TOP_LEVEL_NAMES and kind in ("weight", "bias"):
        yield f"{_TOP_LEVEL_NAMES[module]}.{kind}", tensor
        return
    match = _BLOCK_TENSOR.fullmatch(name)
    if match is None:
        return
    block, module, kind = match.groups()
    if module == "attn.qkv" and len(tensor) % 3 == 0:
        for ours, part in zip(_QKV_NAMES, tensor.chunk(3), strict=True):
            yield f"transformer_blocks.{block}.{ours}.{kind}", part
    elif module in _BLOCK_NAMES:
        yield f"transformer_blocks.{block}.{_BLOCK_NAMES[module]}.{kind}", tensor


def _position_table_errors(name: str, tensor: torch.Tensor, model: VideoDiTTransformer3DModel) -> list[str]:
    """Problems with a position table in an OpenDiT file: a wrong shape, or values other than the model computes."""
    config: Any = model.config
    width, (patch_t, patch, _) = model.width, model.patch
    if name == "pos_embed_temporal":
        table = temporal_sines(width, config.sample_frames // patch_t)
    else:
        table = spatial_sines(width, config.sample_height // patch, config.sample_width // patch)
    # OpenDiT's tables have a batch dimension of 1.
    if tensor.shape != (1, *table.shape):
        return [f"{name}: got {tuple(tensor.shape)}, the config makes {(1, *table.shape)}"]
    # OpenDiT casts the tables with the model; one rounding to bf16 moves a sine by up to 2^-9.
    tolerance = 1e-5 if tensor.dtype in (torch.float32, torch.float64) else 2**-8
    max_error = float((tensor[0].double().cpu() - table).abs().max())
    return [f"{name}: is not the table of sines; off by {max_error:.3g}"] if max_error > tolerance else []
