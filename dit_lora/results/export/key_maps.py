"""Layouts that other programs give a LoRA's file; their names of a model's layers are a fact of its family.

Read from: Comfy-Org/ComfyUI comfy/lora.py (every layer as `diffusion_model.<its own name>`), weight_adapter/lora.py
(`lora_A`, `lora_B`, `alpha` over rank); aigc-apps/VideoX-Fun videox_fun/utils/lora_utils.py (kohya's layout for
CogVideoX). The forms of kohya-ss/sd-scripts and musubi-tuner for FLUX (q, k and v in one layer) and for Wan (its own
names) are read and not written.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dit_lora.adapters.layer_names import LayerNames, kohya_name
from dit_lora.errors import CheckFailedError, DitLoraError, listed
from dit_lora.results.export.updates import Term, Updates

_NO_KOHYA = "kohya's layout is written for what VideoX-Fun loads alone, and it has no such names for this family"


@dataclass(frozen=True)
class LayerKeys:
    """One program's names for the tensors of a layer's LoRA."""

    names: Mapping[str, str]
    """The program's name of each layer, by Diffusers' name."""
    down: str
    up: str
    alpha: bool = True
    """True if alpha has a tensor of its own; where not, B takes the factor alpha over rank."""

    def tensors(self, updates: Updates) -> dict[str, torch.Tensor]:
        """Return a file's tensors: A, B, and as `alpha` the number that over the rank gives the scale."""
        tensors = {}
        for name, (term,) in updates.items():
            key = self.names[name]
            tensors[f"{key}.{self.down}.weight"] = term.a.contiguous()
            b = term.b if self.alpha else term.b * term.scale
            tensors[f"{key}.{self.up}.weight"] = b.contiguous()
            if self.alpha:
                tensors[f"{key}.alpha"] = torch.tensor(term.scale * term.rank)
        return tensors

    def updates(self, tensors: Mapping[str, torch.Tensor]) -> Updates:
        """Return what a file adds to each layer; raises `CheckFailedError` with every tensor that belongs to none."""
        updates, claimed = {}, set()
        for name, key in self.names.items():
            own = [f"{key}.{self.down}.weight", f"{key}.{self.up}.weight"]
            own += [f"{key}.alpha"] if self.alpha else []
            if all(full in tensors for full in own):
                a, b, *alpha = (tensors[full] for full in own)
                updates[name] = [Term(a, b, alpha[0].item() / len(a) if alpha else 1.0)]
                claimed |= {*own}
        stray = [full for full in tensors if full not in claimed]
        if stray:
            raise CheckFailedError(listed("these tensors belong to no layer", stray))
        return updates


def comfyui_layout(names: LayerNames, updates: Updates) -> LayerKeys:
    """Return ComfyUI's layout by its names of Diffusers' layers. Raises `DitLoraError` where it has none, and why."""
    if names.lacking:
        raise DitLoraError(names.lacking)
    counterparts = {name: names.of(name) for name in updates}
    unknown = [name for name, theirs in counterparts.items() if theirs is None]
    if unknown:
        raise DitLoraError(listed("ComfyUI's model has no counterpart of these layers", unknown))
    known = {name: theirs for name, theirs in counterparts.items() if theirs is not None}
    return LayerKeys(known, "lora_A", "lora_B", alpha=names.alpha)


def kohya_layout(has_names: bool, updates: Updates) -> LayerKeys:
    """Return kohya's layout as VideoX-Fun has it. Raises `DitLoraError` for models without, and for convolutions."""
    if not has_names:
        raise DitLoraError(_NO_KOHYA)
    wide = [name for name, terms in updates.items() if max((1, 1, *terms[0].a.shape[2:])) > 1]
    if wide:
        raise DitLoraError(
            listed("kohya's layout takes convolutions of 1x1 alone, not these", wide)
        )
    return LayerKeys({name: kohya_name(name) for name in updates}, "lora_down", "lora_up")
