"""Released files of VideoChat2, by name: which tensor of theirs is which of ours, and which are not needed.

Names are those that OpenGVLab/Ask-Anything saves: video_chat2/models/videochat2_qformer.py (stage 1,
umt_l16_qformer.pth) and models/videochat_{mistra,vicuna,phi}/videochat2_{pt,it}_*.py (stages 2 to 4). A
file holds what trained in its stage, with the buffers of the modules around it (tasks/train_it.py); stage 3
and 4 hold LoRA of the language model.
"""

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dit_lora.errors import DitLoraError, listed

PROMPT_FORMATS = {"mistral": "mistral", "llama": "vicuna", "phi": "phi3"}
"""Prompt formats by the language model's word, such as `mistral` in `mistral_model` and `mistral_proj`."""
MODEL_TYPES = {"mistral": "mistral", "llama": "llama", "phi": "phi3"}
"""The language models' `model_type` by the same words."""

_LLM = "|".join(PROMPT_FORMATS)
# Some files have PEFT's name of the adapter, `default`, in their tensors' names.
_LORA = re.compile(rf"({_LLM})_model\.base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_LANGUAGE_MODEL = re.compile(rf"({_LLM})_model\.(?:base_model\.model\.)?(.+)")
_PROJECTION = re.compile(rf"({_LLM})_proj\.(weight|bias)")
_TEXT_IN_QFORMER = re.compile(
    r"qformer\.bert\.(embeddings\.(word|position)_embeddings|encoder\.layer\.\d+\.(intermediate|output))\..+"
)
_BLOCK = re.compile(r"vision_encoder\.encoder\.blocks\.(\d+)\..+")
_UNUSED = {
    re.compile(r"qformer\.cls\..+"): "the captioning head of stage 1",
    re.compile(r"(vision_proj|text_proj|itm_head)\..+|temp"): "of stage 1's losses",
    re.compile(r"vision_temp_embed"): "time positions that only stage 1 adds",
    re.compile(r"qformer\.bert\.embeddings\.position_ids"): "a buffer of 0, 1, 2, ...",
    re.compile(r"(.+\.)?rotary_emb\.inv_freq"): "a buffer that the model computes",
}


@dataclass(frozen=True)
class TensorPlace:
    """Place of a released tensor in our model."""

    name: str
    """Name of our tensor; for LoRA, of our module."""
    part: Literal["weight", "A", "B"] = "weight"


def place(name: str) -> TensorPlace | None:
    """Return the place of a released tensor; None if its name is none of the model."""
    # The pattern of the language model matches LoRA's names too, so LoRA's goes first.
    if match := _LORA.fullmatch(name):
        return TensorPlace(language_model_name(match[2]), "A" if match[3] == "A" else "B")
    if match := _PROJECTION.fullmatch(name):
        return TensorPlace(f"model.projection.{match[2]}")
    # PEFT 0.7 and later name an adapted weight base_layer.
    if match := _LANGUAGE_MODEL.fullmatch(name):
        return TensorPlace(language_model_name(match[2].replace(".base_layer.", ".")))
    if name.startswith("qformer.bert."):
        return TensorPlace(f"model.qformer.{name.removeprefix('qformer.bert.')}")
    first = name.partition(".")[0]
    if first in ("vision_encoder", "vision_layernorm", "query_tokens", "extra_query_tokens"):
        return TensorPlace(f"model.{name}")
    return None


def language_model_name(name: str) -> str:
    """Return our name of a tensor of a causal language model that its own folder names so.

    `model.layers.0...` is below `model.language_model` in ours; the output head stays on top.
    """
    if name.startswith("model."):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


def why_unused(name: str, *, blocks: int, use_text: bool) -> str | None:
    """Return why the model has no place for this tensor, where that is known; None where it is not.

    `blocks` is the number of the vision encoder's blocks that are built; `use_text` is true if the Q-Former
    reads the instruction.
    """
    for pattern, reason in _UNUSED.items():
        if pattern.fullmatch(name):
            return reason
    match = _BLOCK.fullmatch(name)
    if match and int(match[1]) >= blocks:
        return "vision blocks after the one whose output is read"
    if not use_text and _TEXT_IN_QFORMER.fullmatch(name):
        return "the Q-Former of this config reads no text"
    return None


def language_model_of(names: Mapping[str, Any]) -> str | None:
    """Return `mistral`, `llama` or `phi`, as these names have it; None if none of them names a language model."""
    for name in names:
        for pattern in (_PROJECTION, _LANGUAGE_MODEL):
            if match := pattern.fullmatch(name):
                return match[1]
    return None


def is_instruction_tuned(names: Mapping[str, Any]) -> bool:
    """Return True if these are names of a stage-3 or stage-4 file: LoRA, or a Q-Former that reads text.

    Stage 2 drops the Q-Former's text half (videochat2_pt_mistral.py: word_embeddings = None). Only the code
    of stage 3 and later sets the BOS position to the constant of its id.
    """
    return any(_LORA.fullmatch(name) or _TEXT_IN_QFORMER.fullmatch(name) for name in names)


@dataclass(frozen=True)
class ReleasedFile:
    """The tensors of one .pth; they stay on disk until they are read."""

    path: Path
    tensors: dict[str, torch.Tensor]
    beside: tuple[str, ...] = field(default=())
    """Names of other things that a training run saved with them, such as `optimizer`."""


def read_released(path: Path) -> ReleasedFile:
    """Open a .pth without running code from it; raises `DitLoraError` where it is no file of tensors."""
    try:
        # Only zip files, which torch writes from 1.6 on, can be mapped.
        loaded = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise DitLoraError(_refusal(path)) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise DitLoraError(f"{path} cannot be read as a .pth file: {error}") from error
    beside: tuple[str, ...] = ()
    # A checkpoint of a training run has its weights under `model`.
    if isinstance(loaded, Mapping) and isinstance(loaded.get("model"), Mapping):
        beside = tuple(str(key) for key in loaded if key != "model")
        loaded = loaded["model"]
    if not isinstance(loaded, Mapping):
        raise DitLoraError(f"{path} holds no state dict; got a {type(loaded).__name__}")
    others = [
        f"{name}: {type(value).__name__}"
        for name, value in loaded.items()
        if not isinstance(value, torch.Tensor)
    ]
    if others:
        raise DitLoraError(listed(f"{path} is no state dict; these are no tensors:", others))
    return ReleasedFile(path, dict(loaded), beside)


def _refusal(path: Path) -> str:
    unsafe: list[str] = []
    if zipfile.is_zipfile(path):
        unsafe = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    what = (
        f"objects other than tensors ({', '.join(unsafe)})"
        if unsafe
        else "no tensors that are safe to read"
    )
    return (
        f"{path} holds {what}, and unpickling those may run any code, so it was not opened; where you trust it, "
        "save its weights alone: torch.save(torch.load(old, weights_only=False)['model'], new)"
    )
