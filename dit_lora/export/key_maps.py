"""Key names of LoRA files in other programs. Their names for a model's layers come from its family.

Sources: Comfy-Org/ComfyUI comfy/lora.py (every layer as `diffusion_model.<its own name>`), weight_adapter/lora.py
(`lora_A`, `lora_B`, `alpha` over rank); aigc-apps/VideoX-Fun videox_fun/utils/lora_utils.py (kohya's layout for
CogVideoX). The formats of kohya-ss/sd-scripts and musubi-tuner for FLUX (q, k and v in one layer) and for Wan (its own
names) are read and not written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dit_lora.adapters.layer_names import LayerNames, get_kohya_name
from dit_lora.errors import CheckFailedError, DitLoraError, format_list
from dit_lora.export.weight_delta import LoraTerm, Updates

_KOHYA_UNSUPPORTED = "kohya's layout is only written for families that VideoX-Fun loads, and this is not one of them"


@dataclass(frozen=True)
class LayerTensorNames:
    """One program's names for the tensors of a layer's LoRA."""

    layer_names: Mapping[str, str]
    """Diffusers' name of each layer to the program's name."""
    down_key: str
    up_key: str
    has_alpha: bool = True
    """True if the file has a tensor for alpha; if not, alpha / rank is folded into B."""
    joined_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The program's name of each layer that joins the output rows of several layers, which `layer_names` lacks."""

    def build_lora_tensors(self, updates: Updates) -> dict[str, torch.Tensor]:
        """The tensors of a LoRA file by name: A, B, and `alpha`, which divided by the rank gives the scale."""
        # One term per layer: these formats have no place for a sum of products.
        terms = {self.layer_names[name]: term for name, (term,) in updates.items() if name in self.layer_names}
        for key, parts in self.joined_layers.items():
            # A's one below the other, and B's as blocks on a diagonal, whose rank is the sum of theirs.
            joined = [updates[part][0] for part in parts]
            scale = joined[0].scale
            blocks = [term.b * (term.scale / scale) for term in joined]
            terms[key] = LoraTerm(torch.cat([term.a for term in joined]), torch.block_diag(*blocks), scale)
        tensors = {}
        for key, term in terms.items():
            tensors[f"{key}.{self.down_key}.weight"] = term.a.contiguous()
            b = term.b if self.has_alpha else term.b * term.scale
            tensors[f"{key}.{self.up_key}.weight"] = b.contiguous()
            if self.has_alpha:
                # Readers divide alpha by the rank, which gives back the scale.
                tensors[f"{key}.alpha"] = torch.tensor(term.scale * term.rank)
        return tensors

    def read_lora_updates(self, tensors: Mapping[str, torch.Tensor]) -> Updates:
        """Each layer's LoRA update in a file. Raises `CheckFailedError` with all tensors that belong to no layer."""
        # Read as the program does: layer by layer, by its own key names.
        updates, claimed = {}, set()
        layers_by_key = {key: (name,) for name, key in self.layer_names.items()} | dict(self.joined_layers)
        for key, parts in layers_by_key.items():
            layer_keys = [f"{key}.{self.down_key}.weight", f"{key}.{self.up_key}.weight"]
            layer_keys += [f"{key}.alpha"] if self.has_alpha else []
            if all(full in tensors for full in layer_keys):
                # `alpha` is empty for formats that have the scale folded into B.
                a, b, *alpha = (tensors[full] for full in layer_keys)
                scale = alpha[0].item() / len(a) if alpha else 1.0
                # Layers in a joined one have the same number of rows, and all of its A.
                for part, rows in zip(parts, b.chunk(len(parts)), strict=True):
                    updates[part] = [LoraTerm(a, rows, scale)]
                claimed |= {*layer_keys}
        unknown_keys = [full for full in tensors if full not in claimed]
        if unknown_keys:
            raise CheckFailedError(format_list("these tensors belong to no layer", unknown_keys))
        return updates


def build_comfyui_layout(names: LayerNames, updates: Updates) -> LayerTensorNames:
    """ComfyUI's names for the LoRA tensors of these layers. Raises `DitLoraError`, with the reason, if it has none."""
    if names.unsupported_reason:
        raise DitLoraError(names.unsupported_reason)
    joined = dict(filter(None, map(names.translate_joined_layer_name, updates)))
    incomplete = [part for parts in joined.values() for part in parts if part not in updates]
    if incomplete:
        raise DitLoraError(
            format_list(
                "ComfyUI's model joins these layers with others that have an adapter; train them too", incomplete
            )
        )
    in_joined = {part for parts in joined.values() for part in parts}
    # All layers must have a name in ComfyUI: a file that drops some would change the update.
    counterparts = {name: names.translate_layer_name(name) for name in updates if name not in in_joined}
    unknown = [name for name, comfyui_name in counterparts.items() if comfyui_name is None]
    if unknown:
        raise DitLoraError(format_list("ComfyUI's model has no counterpart of these layers", unknown))
    renamed = {name: comfyui_name for name, comfyui_name in counterparts.items() if comfyui_name is not None}
    return LayerTensorNames(renamed, "lora_A", "lora_B", has_alpha=names.reads_alpha, joined_layers=joined)


def build_kohya_layout(has_names: bool, updates: Updates) -> LayerTensorNames:
    """kohya's names for LoRA tensors, as in VideoX-Fun.

    Raises `DitLoraError` for models that it lacks, and for convolutions over 1x1.
    """
    if not has_names:
        raise DitLoraError(_KOHYA_UNSUPPORTED)
    # `a` is (rank, inputs, height, width) for convolutions, so dimensions 2 and 3 are the kernel's size.
    large_kernels = [name for name, terms in updates.items() if max((1, 1, *terms[0].a.shape[2:])) > 1]
    if large_kernels:
        raise DitLoraError(format_list("kohya's layout supports only 1x1 convolutions, not these", large_kernels))
    return LayerTensorNames({name: get_kohya_name(name) for name in updates}, "lora_down", "lora_up")
