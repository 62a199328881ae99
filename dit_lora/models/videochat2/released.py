"""Maps tensor names in VideoChat2's released files to our names, and lists the tensors that are not needed.

Names are those that OpenGVLab/Ask-Anything saves: video_chat2/models/videochat2_qformer.py (stage 1,
umt_l16_qformer.pth) and models/videochat_{mistra,vicuna,phi}/videochat2_{pt,it}_*.py (stages 2 to 4). A
file has what was trained in its stage, with the buffers of the modules around it (tasks/train_it.py). Stages 3
and 4 have a LoRA of the language model.
"""

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dit_lora.errors import DitLoraError, format_list
from dit_lora.files import open_regular_file

PROMPT_FORMATS = {"mistral": "mistral", "llama": "vicuna", "phi": "phi3"}
"""The language model's name in the files (`mistral` in `mistral_model` and `mistral_proj`) to its prompt format."""
MODEL_TYPES = {"mistral": "mistral", "llama": "llama", "phi": "phi3"}
"""The same names to the language models' `model_type`."""

# Alternatives for the regular expressions below.
_LANGUAGE_MODELS = "|".join(PROMPT_FORMATS)
# Some files have PEFT's adapter name, `default`, in their tensors' names.
_LORA = re.compile(rf"({_LANGUAGE_MODELS})_model\.base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# The language model's own tensors, with or without PEFT's prefix.
_LANGUAGE_MODEL = re.compile(rf"({_LANGUAGE_MODELS})_model\.(?:base_model\.model\.)?(.+)")
_PROJECTION = re.compile(rf"({_LANGUAGE_MODELS})_proj\.(weight|bias)")
# The Q-Former's parts that only text uses: embeddings, and the text's feed-forward in each layer.
_TEXT_IN_QFORMER = re.compile(
    r"qformer\.bert\.(embeddings\.(word|position)_embeddings|encoder\.layer\.\d+\.(intermediate|output))\..+"
)
_VISION_BLOCK = re.compile(r"vision_encoder\.encoder\.blocks\.(\d+)\..+")
_UNUSED_REASONS = {
    re.compile(r"qformer\.cls\..+"): "the captioning head of stage 1",
    re.compile(r"(vision_proj|text_proj|itm_head)\..+|temp"): "of stage 1's losses",
    re.compile(r"vision_temp_embed"): "time positions that only stage 1 adds",
    re.compile(r"qformer\.bert\.embeddings\.position_ids"): "a buffer of 0, 1, 2, ...",
    re.compile(r"(.+\.)?rotary_emb\.inv_freq"): "a buffer that the model computes",
}


@dataclass(frozen=True)
class TensorTarget:
    """Name and part of the converted model's tensor that a released tensor becomes."""

    name: str
    """Name of our tensor; for LoRA, of our module."""
    part: Literal["weight", "A", "B"] = "weight"


def map_tensor_name(name: str) -> TensorTarget | None:
    """Tensor of the converted VideoChat2 model that a released tensor becomes; None for an unknown name."""
    # The pattern of the language model matches LoRA's names too, so LoRA's goes first.
    if match := _LORA.fullmatch(name):
        return TensorTarget(map_language_model_name(match[2]), "A" if match[3] == "A" else "B")
    if match := _PROJECTION.fullmatch(name):
        return TensorTarget(f"model.projection.{match[2]}")
    # PEFT 0.7 and later name an adapted weight base_layer.
    if match := _LANGUAGE_MODEL.fullmatch(name):
        return TensorTarget(map_language_model_name(match[2].replace(".base_layer.", ".")))
    if name.startswith("qformer.bert."):
        return TensorTarget(f"model.qformer.{name.removeprefix('qformer.bert.')}")
    prefix = name.partition(".")[0]
    if prefix in ("vision_encoder", "vision_layernorm", "query_tokens", "extra_query_tokens"):
        return TensorTarget(f"model.{name}")
    return None


def map_language_model_name(name: str) -> str:
    """Translate a tensor name from the language model's own folder to the converted VideoChat2 model.

    `model.layers.0...` moves below `model.language_model`; the output head stays at the top level.
    """
    if name.startswith("model."):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


def unused_reason(name: str, *, blocks: int, use_text: bool) -> str | None:
    """Why VideoChat2 does not need a released tensor; None if it does, or if the name is unknown.

    Args:
        name: The released name.
        blocks: Number of the vision encoder's blocks that are built.
        use_text: True if the Q-Former reads the instruction.
    """
    for pattern, reason in _UNUSED_REASONS.items():
        if pattern.fullmatch(name):
            return reason
    # Blocks after the output block are in the files but not in the model.
    match = _VISION_BLOCK.fullmatch(name)
    if match and int(match[1]) >= blocks:
        return "vision blocks after the one whose output is read"
    if not use_text and _TEXT_IN_QFORMER.fullmatch(name):
        return "the Q-Former of this config reads no text"
    return None


def find_language_model(names: Mapping[str, Any]) -> str | None:
    """Kind of the language model by its tensor names: `mistral`, `llama` or `phi`; None without such a model."""
    for name in names:
        for pattern in (_PROJECTION, _LANGUAGE_MODEL):
            if match := pattern.fullmatch(name):
                return match[1]
    return None


def is_instruction_tuned(names: Mapping[str, Any]) -> bool:
    """True if tensor names are of a stage-3 or stage-4 VideoChat2 file: with LoRA, or with a Q-Former that reads text.

    Stage 2 drops the Q-Former's text half (videochat2_pt_mistral.py: word_embeddings = None). Only the code
    of stage 3 and later sets the BOS position to the constant of its id.
    """
    return any(_LORA.fullmatch(name) or _TEXT_IN_QFORMER.fullmatch(name) for name in names)


@dataclass(frozen=True)
class ReleasedWeightsFile:
    """The tensors of one .pth file. They stay on disk until they are used."""

    path: Path
    tensors: dict[str, torch.Tensor]
    other_entries: tuple[str, ...] = field(default=())
    """Names of other entries that a training run saved, such as `optimizer`."""


def read_released_weights(path: Path) -> ReleasedWeightsFile:
    """Open a .pth file without running code from it. Raises `DitLoraError` if it has anything but tensors."""
    try:
        # torch would wait forever on a named pipe.
        open_regular_file(path).close()
        # Only zip files, which torch has written since 1.6, can be memory-mapped.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        # Only zip files can be inspected without unpickling them.
        unsafe = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)) if zipfile.is_zipfile(path) else []
        content = f"objects other than tensors ({', '.join(unsafe)})" if unsafe else "no tensors that are safe to read"
        raise DitLoraError(
            f"{path} holds {content}, and unpickling them can run any code, so it was not opened; if you "
            "trust it, save only its weights: torch.save(torch.load(old, weights_only=False)['model'], new)"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        # torch explains itself over several sentences; the first has the reason.
        reason = str(error).partition(". ")[0]
        raise DitLoraError(f"{path} cannot be read as a .pth file: {reason}") from error
    other_keys: tuple[str, ...] = ()
    # A checkpoint of a training run has its weights under `model`.
    if isinstance(loaded, Mapping) and isinstance(loaded.get("model"), Mapping):
        other_keys = tuple(str(key) for key in loaded if key != "model")
        loaded = loaded["model"]
    if not isinstance(loaded, Mapping):
        raise DitLoraError(f"{path} has no state dict; got a {type(loaded).__name__}")
    not_tensors = [
        f"{name}: {type(value).__name__}" for name, value in loaded.items() if not isinstance(value, torch.Tensor)
    ]
    if not_tensors:
        raise DitLoraError(format_list(f"{path} is not a state dict; these are not tensors:", not_tensors))
    return ReleasedWeightsFile(path, dict(loaded), other_keys)
