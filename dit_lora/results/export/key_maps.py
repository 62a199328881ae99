"""Layouts that other programs give a LoRA's file; their names of a model's layers are a fact of its family.

Read from: Comfy-Org/ComfyUI comfy/lora.py (every layer as `diffusion_model.<its own name>`), weight_adapter/lora.py
(`lora_A`, `lora_B`, `alpha` over rank); aigc-apps/VideoX-Fun videox_fun/utils/lora_utils.py (kohya's layout for
CogVideoX). Neither kohya-ss/sd-scripts nor musubi-tuner has a network for a family of ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dit_lora.errors import CheckFailedError, DitLoraError, listed
from dit_lora.results.export.updates import Term, Updates

_NO_KOHYA = "kohya's trainers (sd-scripts, musubi-tuner) have no such model, and nobody publishes names for it"


@dataclass(frozen=True)
class LayerKeys:
    """One program's names for the tensors of a layer's LoRA."""

    names: Mapping[str, str]
    """The program's name of each layer, by Diffusers' name."""
    down: str
    up: str

    def tensors(self, updates: Updates) -> dict[str, torch.Tensor]:
        """Return a file's tensors: A, B, and as `alpha` the number that over the rank gives the scale."""
        tensors = {}
        for name, (term,) in updates.items():
            key = self.names[name]
            tensors[f"{key}.{self.down}.weight"] = term.a.contiguous()
            tensors[f"{key}.{self.up}.weight"] = term.b.contiguous()
            tensors[f"{key}.alpha"] = torch.tensor(term.scale * term.rank)
        return tensors

    def updates(self, tensors: Mapping[str, torch.Tensor]) -> Updates:
        """Return what a file adds to each layer; raises `CheckFailedError` with every tensor that belongs to none."""
        updates, claimed = {}, set()
        for name, key in self.names.items():
            own = [f"{key}.{self.down}.weight", f"{key}.{self.up}.weight", f"{key}.alpha"]
            if all(full in tensors for full in own):
                a, b, alpha = (tensors[full] for full in own)
                updates[name] = [Term(a, b, alpha.item() / len(a))]
                claimed |= {*own}
        stray = [full for full in tensors if full not in claimed]
        if stray:
            raise CheckFailedError(listed("these tensors belong to no layer", stray))
        return updates


def comfyui_layout(names: Mapping[str, str] | str, updates: Updates) -> LayerKeys:
    """Return ComfyUI's layout by its `names` of Diffusers' layers, in which `*` is a block's number.

    Raises `DitLoraError` where it has no such layer, and where `names` says why it has no such model.
    """
    if isinstance(names, str):
        raise DitLoraError(names or "no names of ComfyUI are known here for this family")
    counterparts = {name: _in_comfyui(names, name) for name in updates}
    unknown = [name for name, theirs in counterparts.items() if theirs is None]
    if unknown:
        raise DitLoraError(listed("ComfyUI's model has no counterpart of these layers", unknown))
    return LayerKeys(
        {name: f"diffusion_model.{theirs}" for name, theirs in counterparts.items()},
        "lora_A",
        "lora_B",
    )


def kohya_layout(has_names: bool, updates: Updates) -> LayerKeys:
    """Return kohya's layout as VideoX-Fun has it. Raises `DitLoraError` for models without, and for convolutions."""
    if not has_names:
        raise DitLoraError(_NO_KOHYA)
    wide = [name for name, terms in updates.items() if max((1, 1, *terms[0].a.shape[2:])) > 1]
    if wide:
        raise DitLoraError(
            listed("kohya's layout takes convolutions of 1x1 alone, not these", wide)
        )
    # The two underscores stand around an empty part of the name, as VideoX-Fun writes and looks for it.
    names = {name: f"lora_unet__{name.replace('.', '_')}" for name in updates}
    return LayerKeys(names, "lora_down", "lora_up")


def _in_comfyui(names: Mapping[str, str], name: str) -> str | None:
    if name in names:
        return names[name]
    list_name, _, rest = name.partition(".")
    number, _, inner = rest.partition(".")
    theirs = names.get(f"{list_name}.*.{inner}") if number.isdecimal() else None
    return theirs and theirs.replace("*", number)
