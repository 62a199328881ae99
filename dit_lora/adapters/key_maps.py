"""Names that other programs give a transformer's layers in LoRA files, for the families where they have such names.

Read from: Comfy-Org/ComfyUI comfy/lora.py (every layer as `diffusion_model.<its own name>`),
weight_adapter/lora.py (`lora_A`, `lora_B`, `alpha` over rank), ldm/cogvideo/model.py (the names);
aigc-apps/VideoX-Fun videox_fun/utils/lora_utils.py (kohya's layout for CogVideoX). Neither
kohya-ss/sd-scripts nor musubi-tuner has a network for a family of ours.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from dit_lora.adapters.terms import Term, Updates
from dit_lora.errors import CheckFailedError, DitLoraError, listed

_IN_BLOCKS = {
    "norm1.linear": "norm1.linear",
    "norm2.linear": "norm2.linear",
    "attn1.to_q": "q",
    "attn1.to_k": "k",
    "attn1.to_v": "v",
    "attn1.to_out.0": "attn_out",
    "ff.net.0.proj": "ff_proj",
    "ff.net.2": "ff_out",
}
_OUTSIDE = {
    "patch_embed.proj": "patch_embed.proj",
    "patch_embed.text_proj": "patch_embed.text_proj",
    "time_embedding.linear_1": "time_embedding_linear_1",
    "time_embedding.linear_2": "time_embedding_linear_2",
    "ofs_embedding.linear_1": "ofs_embedding_linear_1",
    "ofs_embedding.linear_2": "ofs_embedding_linear_2",
    "norm_out.linear": "norm_out.linear",
    "proj_out": "proj_out",
}
_NO_COMFYUI = {
    "sana": "ComfyUI has no Sana; the nodes that have one (ComfyUI_ExtraModels) load no LoRA for it",
    "sana_video": "ComfyUI has no SANA-Video",
    "dit": "ComfyUI has no DiT with class labels",
    "video_dit": "ComfyUI has no such model",
    "latte": "ComfyUI has no Latte",
}
_NO_KOHYA = "kohya's trainers (sd-scripts, musubi-tuner) have no such model, and nobody publishes names for it"


@dataclass(frozen=True)
class Layout:
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
        by_key = {key: name for name, key in self.names.items()}
        parts: dict[str, dict[str, torch.Tensor]] = {}
        stray = []
        for full, tensor in tensors.items():
            # Names of layers hold dots, so the longest known beginning of a key is the layer's.
            key = next((key for key in _heads(full) if key in by_key), None)
            if key is None:
                stray.append(full)
            else:
                parts.setdefault(key, {})[full[len(key) + 1 :]] = tensor
        wanted = {f"{self.down}.weight", f"{self.up}.weight", "alpha"}
        stray += [
            f"{key}: {', '.join(sorted(part))}"
            for key, part in parts.items()
            if part.keys() != wanted
        ]
        if stray:
            raise CheckFailedError(listed("these tensors belong to no layer", stray))
        return {by_key[key]: [self._term(part)] for key, part in parts.items()}

    def _term(self, part: Mapping[str, torch.Tensor]) -> Term:
        a, b = part[f"{self.down}.weight"], part[f"{self.up}.weight"]
        return Term(a, b, part["alpha"].item() / len(a))


def comfyui_layout(family: str, updates: Updates) -> Layout:
    """Return ComfyUI's own names. Raises `DitLoraError` where it has no such model, or no such layer."""
    if family != "cogvideox":
        raise DitLoraError(
            _NO_COMFYUI.get(family, f"no names of ComfyUI are known here for the family {family}")
        )
    names = {name: _in_comfyui(name) for name in updates}
    unknown = [name for name, counterpart in names.items() if counterpart is None]
    if unknown:
        raise DitLoraError(
            listed("ComfyUI's CogVideoX has no counterpart of these layers", unknown)
        )
    return Layout(
        {name: f"diffusion_model.{counterpart}" for name, counterpart in names.items()},
        "lora_A",
        "lora_B",
    )


def kohya_layout(family: str, updates: Updates) -> Layout:
    """Return kohya's layout as VideoX-Fun has it for CogVideoX.

    Raises `DitLoraError` for other models and convolutions.
    """
    if family != "cogvideox":
        raise DitLoraError(_NO_KOHYA)
    wide = [name for name, terms in updates.items() if max((1, 1, *terms[0].a.shape[2:])) > 1]
    if wide:
        raise DitLoraError(
            listed("kohya's layout takes convolutions of 1x1 alone, not these", wide)
        )
    # The two underscores stand around an empty part of the name, as VideoX-Fun writes and looks for it.
    names = {name: f"lora_unet__{name.replace('.', '_')}" for name in updates}
    return Layout(names, "lora_down", "lora_up")


def _in_comfyui(name: str) -> str | None:
    block = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", name)
    if block is None:
        return _OUTSIDE.get(name)
    inner = _IN_BLOCKS.get(block[2])
    return inner and f"blocks.{block[1]}.{inner}"


def _heads(key: str) -> Iterable[str]:
    """Return the names that a key may begin with, longest first."""
    parts = key.split(".")
    return (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
