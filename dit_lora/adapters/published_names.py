"""Layer names of the published models whose layers Diffusers splits, or whose rows it reorders.

The keys are the published names, and `*` is a block's number. Each value lists Diffusers' layers in the order of their
output rows: a single layer is a rename, several are one joined layer. Sources: Comfy-Org/ComfyUI comfy/utils.py
(`flux_to_diffusers`, `mmdit_to_diffusers`, `z_image_to_diffusers`) and diffusers loaders/single_file_utils.py.

A published adaptive norm before an output (`final_layer.adaLN_modulation.1`) has shift before scale. Diffusers'
`AdaLayerNormContinuous` has scale before shift, so the halves of B are swapped.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from diffusers.models.normalization import AdaLayerNormContinuous
from torch import nn

from dit_lora.adapters.layer_names import iterate_prefixed_names, split_block_number

PublishedNames = Mapping[str, tuple[str, ...]]


def _map_joined_layer(published: str, block: str, layers: str) -> dict[str, tuple[str, ...]]:
    return {published: tuple(f"{block}.{layer}" for layer in layers.split())}


def _map_renamed_layers(prefix: str, block: str, names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {
        f"{prefix}{published_name}": (f"{block}{diffusers_name}",) for published_name, diffusers_name in names.items()
    }


_FLUX_BLOCK = "transformer_blocks.*"
_FLUX_ATTENTION: PublishedNames = {
    **_map_joined_layer("double_blocks.*.img_attn.qkv", f"{_FLUX_BLOCK}.attn", "to_q to_k to_v"),
    **_map_joined_layer("double_blocks.*.txt_attn.qkv", f"{_FLUX_BLOCK}.attn", "add_q_proj add_k_proj add_v_proj"),
    "double_blocks.*.img_attn.proj": (f"{_FLUX_BLOCK}.attn.to_out.0",),
    "double_blocks.*.txt_attn.proj": (f"{_FLUX_BLOCK}.attn.to_add_out",),
}
_FLUX_ENDS: PublishedNames = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}


def _map_flux_embedders(module: str, names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {
        f"{published_name}.{layer}": (f"{module}.{diffusers_name}.linear_{number}",)
        for published_name, diffusers_name in names.items()
        for number, layer in ((1, "in_layer"), (2, "out_layer"))
    }


_FLUX: PublishedNames = {
    **_FLUX_ATTENTION,
    **_FLUX_ENDS,
    **_map_renamed_layers(
        "double_blocks.*.",
        f"{_FLUX_BLOCK}.",
        {
            "img_mlp.0": "ff.net.0.proj",
            "img_mlp.2": "ff.net.2",
            "txt_mlp.0": "ff_context.net.0.proj",
            "txt_mlp.2": "ff_context.net.2",
            "img_mod.lin": "norm1.linear",
            "txt_mod.lin": "norm1_context.linear",
        },
    ),
    **_map_joined_layer(
        "single_blocks.*.linear1", "single_transformer_blocks.*", "attn.to_q attn.to_k attn.to_v proj_mlp"
    ),
    **_map_renamed_layers(
        "single_blocks.*.", "single_transformer_blocks.*.", {"linear2": "proj_out", "modulation.lin": "norm.linear"}
    ),
    **_map_flux_embedders(
        "time_text_embed",
        {"time_in": "timestep_embedder", "vector_in": "text_embedder", "guidance_in": "guidance_embedder"},
    ),
}
# FLUX.1's blocks without modulations, which one network computes.
_CHROMA: PublishedNames = {
    **_FLUX,
    # The rest of that network has the same names.
    "distilled_guidance_layer.layers.*.in_layer": ("distilled_guidance_layer.layers.*.linear_1",),
    "distilled_guidance_layer.layers.*.out_layer": ("distilled_guidance_layer.layers.*.linear_2",),
}
_FLUX2: PublishedNames = {
    **_FLUX_ATTENTION,
    **_FLUX_ENDS,
    **_map_renamed_layers(
        "double_blocks.*.",
        f"{_FLUX_BLOCK}.",
        {
            "img_mlp.0": "ff.linear_in",
            "img_mlp.2": "ff.linear_out",
            "txt_mlp.0": "ff_context.linear_in",
            "txt_mlp.2": "ff_context.linear_out",
        },
    ),
    **_map_renamed_layers(
        "single_blocks.*.", "single_transformer_blocks.*.attn.", {"linear1": "to_qkv_mlp_proj", "linear2": "to_out"}
    ),
    "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
    "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
    "single_stream_modulation.lin": ("single_stream_modulation.linear",),
    **_map_flux_embedders("time_guidance_embed", {"time_in": "timestep_embedder", "guidance_in": "guidance_embedder"}),
}
_SD3_BLOCK = "transformer_blocks.*"
_SD3: PublishedNames = {
    **_map_joined_layer("joint_blocks.*.x_block.attn.qkv", f"{_SD3_BLOCK}.attn", "to_q to_k to_v"),
    **_map_joined_layer("joint_blocks.*.x_block.attn2.qkv", f"{_SD3_BLOCK}.attn2", "to_q to_k to_v"),
    **_map_joined_layer(
        "joint_blocks.*.context_block.attn.qkv", f"{_SD3_BLOCK}.attn", "add_q_proj add_k_proj add_v_proj"
    ),
    **_map_renamed_layers(
        "joint_blocks.*.",
        f"{_SD3_BLOCK}.",
        {
            "x_block.attn.proj": "attn.to_out.0",
            "x_block.attn2.proj": "attn2.to_out.0",
            "x_block.mlp.fc1": "ff.net.0.proj",
            "x_block.mlp.fc2": "ff.net.2",
            "x_block.adaLN_modulation.1": "norm1.linear",
            "context_block.attn.proj": "attn.to_add_out",
            "context_block.mlp.fc1": "ff_context.net.0.proj",
            "context_block.mlp.fc2": "ff_context.net.2",
            "context_block.adaLN_modulation.1": "norm1_context.linear",
        },
    ),
    "x_embedder.proj": ("pos_embed.proj",),
    "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
    "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
    "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
    "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
_Z_IMAGE_BLOCKS = ("layers.*", "noise_refiner.*", "context_refiner.*")
_Z_IMAGE: PublishedNames = {
    **{f"{block}.attention.qkv": tuple(f"{block}.attention.to_{part}" for part in "qkv") for block in _Z_IMAGE_BLOCKS},
    **{f"{block}.attention.out": (f"{block}.attention.to_out.0",) for block in _Z_IMAGE_BLOCKS},
    "x_embedder": ("all_x_embedder.2-1",),
    "final_layer.linear": ("all_final_layer.2-1.linear",),
    "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
}
_IDEOGRAM4: PublishedNames = {
    **_map_joined_layer("layers.*.attention.qkv", "layers.*.attention", "to_q to_k to_v"),
    "layers.*.attention.o": ("layers.*.attention.to_out.0",),
}
# Only the layers that ComfyUI joins: names of single layers are in `LayerNames.renames`.
_HUNYUAN_VIDEO15: PublishedNames = {
    **_FLUX_ATTENTION,
    **_map_joined_layer(
        "txt_in.individual_token_refiner.blocks.*.self_attn.qkv",
        "context_embedder.token_refiner.refiner_blocks.*.attn",
        "to_q to_k to_v",
    ),
}
# By the class of the transformer.
PUBLISHED_NAMES: Mapping[str, PublishedNames] = {
    "ChromaTransformer2DModel": _CHROMA,
    "FluxTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX2,
    "HunyuanVideo15Transformer3DModel": _HUNYUAN_VIDEO15,
    "Ideogram4Transformer2DModel": _IDEOGRAM4,
    "SD3Transformer2DModel": _SD3,
    "ZImageTransformer2DModel": _Z_IMAGE,
}


def map_published_spellings(model: nn.Module, names: Iterable[str]) -> dict[str, list[str]]:
    """Map each file name of a published model's layer to the Diffusers layers that it is split into, by rows."""
    model_layers = set(names)
    numbers: dict[str, list[str]] = defaultdict(list)
    for name in model_layers:
        pattern, number = split_block_number(name)
        numbers[pattern].append(number)
    layers_by_name = {}
    for published, patterns in PUBLISHED_NAMES.get(type(model).__name__, {}).items():
        for number in numbers[patterns[0]]:
            layers = [pattern.replace("*", number) for pattern in patterns]
            # Variants of a model lack some layers, such as the guidance embedder.
            if model_layers.issuperset(layers):
                for spelling in iterate_prefixed_names(published.replace("*", number)):
                    layers_by_name[spelling] = layers
    return layers_by_name


def split_joined_lora_b(model: nn.Module, layers: list[str], b: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Split B of a published model's layer by rows into one B for each of Diffusers' layers."""
    parts = []
    for layer, part in zip(layers, b.split(sizes), strict=True):
        if isinstance(model.get_submodule(layer.rpartition(".")[0]), AdaLayerNormContinuous):
            shift, scale = part.chunk(2)
            part = torch.cat([scale, shift])
        parts.append(part)
    return parts
