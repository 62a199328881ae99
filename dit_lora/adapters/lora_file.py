"""Reads a LoRA's file, whoever wrote it: Diffusers' form, PEFT's, ComfyUI's or kohya's; each layer by Diffusers' name.

Rank is a matrix's size. Alpha is what the file's `.alpha` tensors say, else PEFT's config in its header or beside it, or
the run's where the file is of a checkpoint, else the rank. Text encoders' layers, DoRA's magnitudes and full differences belong to no LoRA of a transformer, and
are refused by name: a file is read whole or not at all.
"""

import hashlib
import inspect
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from dit_lora.adapters.layer_names import LayerNames, layers_by_spelling
from dit_lora.adapters.lora_mixins import lora_pipeline_class
from dit_lora.config.lora import FROM_WEIGHT
from dit_lora.errors import DitLoraError, listed
from dit_lora.numerics.finite import not_finite
from dit_lora.parsing import parse_json, read_json

_MATRIX = re.compile(
    r"(.+)\.(lora_A|lora_down|lora\.down|lora_B|lora_up|lora\.up)(?:\.default)?\.weight"
)
_ALPHA = re.compile(r"(.+)\.alpha")
_IS_A = ("lora_A", "lora_down", "lora.down")
# What Diffusers' converters raise of names that they do not know, and of sides: FLUX's are written into its one.
OF_CONVERTERS = (
    ValueError,
    LookupError,
    AttributeError,
    RuntimeError,
    AssertionError,
)
WEIGHTS_FILE, AVERAGES_FILE, STATE_FILE = "trainable.safetensors", "ema.safetensors", "state.json"
"""Files of a run's checkpoint: what trains, its moving averages, and what run it is of."""
_METADATA = "lora_adapter_metadata"  # the key of PEFT's config in a header that Diffusers wrote


Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StoredLayer:
    """One layer's LoRA, as a file has it, in fp32."""

    a: torch.Tensor
    """(rank, inputs), of a convolution (rank, inputs, height, width)."""
    b: torch.Tensor
    """(outputs, rank), of a convolution (outputs, rank, 1, 1)."""
    alpha: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True)
class LoraFile:
    """A LoRA's file, read for one model."""

    file: Path
    config: Mapping[str, Any] | None
    """PEFT's config as the file brings it; None without, and where the file has alpha in tensors of its own."""
    layers: Mapping[str, StoredLayer]
    """Layers by their names in the model."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the file, and of the config beside it if that has a file of its own."""


def read_lora(file: Path, model: nn.Module, comfyui: LayerNames, pipeline_class: Any) -> LoraFile:
    """Read a file for a model, whose weights need no values and which may have adapters.

    Raises `DitLoraError` with every name that fits no layer, every shape that is not its layer's, and for what is no
    safetensors file or not finite.
    """
    tensors, header = _opened(file)
    beside = file.with_name(CONFIG_NAME)
    in_peft_format = file.name == SAFETENSORS_WEIGHTS_NAME and beside.is_file()
    config = read_json(beside) if in_peft_format else config_in(header, file)
    names = [name for name, _ in model.named_modules() if name]
    found = _by_layer(file, tensors, layers_by_spelling(names, comfyui), pipeline_class)
    of_run = _config_of_checkpoint(file)
    if of_run is not None:
        for name, own in found.items():
            own["alpha"] = torch.tensor(_alpha(name, own, of_run))
    what = f"{file} was trained on another model than this {type(model).__name__}"
    _require_pairs(file, found)
    mismatches = [words for name, own in found.items() for words in _misfits(model, name, own)]
    if mismatches:
        raise DitLoraError(listed(what, mismatches))
    bad = not_finite([(name, tensor) for name, tensor in tensors.items()])
    if bad:
        raise DitLoraError(listed(f"{file}: these tensors are not finite", bad))
    layers = {
        name: StoredLayer(own["A"].float(), own["B"].float(), _alpha(name, own, config))
        for name, own in sorted(found.items())
    }
    files = {"sha256": file} | ({"config_sha256": beside} if in_peft_format else {})
    if any("alpha" in own for own in found.values()):
        config = None  # what it says of alpha does not count
    digests = {name: _sha256(path) for name, path in files.items()}
    return LoraFile(file, config, layers, digests)


def _opened(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        # With values wherever the model is made, on `meta` too.
        with torch.device("cpu"), safe_open(file, framework="pt") as opened:
            header = dict(opened.metadata() or {})
            return tensors_in(file), header
    except (OSError, SafetensorError) as error:
        raise DitLoraError(f"{file} is not a safetensors file, or not whole: {error}") from error


def tensors_in(file: Path) -> dict[str, torch.Tensor]:
    """Return a file's tensors; of a run's checkpoint the averages in place of the weights, if it keeps some."""
    tensors, averages = load_file(file), file.with_name(AVERAGES_FILE)
    if file.name == WEIGHTS_FILE and averages.is_file():
        # What the run shows, measures and saves.
        tensors |= {name.removeprefix("ema/"): one for name, one in load_file(averages).items()}
    return tensors


def config_in(header: Mapping[str, str], file: Path) -> dict[str, Any] | None:
    """Return PEFT's config of the transformer's adapter as Diffusers writes it into a header; None without."""
    try:
        stored = parse_json(header.get(_METADATA, "{}"))
    except ValueError as error:
        raise DitLoraError(f"{file}: its header's {_METADATA} is no JSON: {error}") from error
    prefix = "transformer."
    own = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
    return own or None


def _config_of_checkpoint(file: Path) -> dict[str, Any] | None:
    """Return what PEFT's config says of alpha in the run whose checkpoint a file is of; None for any other file.

    Raises `DitLoraError` where the checkpoint does not say it either.
    """
    beside = file.with_name(STATE_FILE)
    if file.name != WEIGHTS_FILE or not beside.is_file():
        return None
    identity = read_json(beside).get("identity", {})
    init = identity.get("lora.init")
    if init in FROM_WEIGHT:
        run = file.absolute().parents[2]
        raise DitLoraError(
            f"{file} has what trained of {init} without its start; end the run, and give its folder: {run}"
        )
    if "lora.rank" not in identity:
        run = file.absolute().parents[2]
        raise DitLoraError(
            f"{file} is of a checkpoint that does not say its alpha, for its run started from a LoRA's file or trained "
            f"none; end the run, and give its folder: {run}"
        )
    return {
        "lora_alpha": float(identity.get("lora.alpha") or identity["lora.rank"]),
        "alpha_pattern": identity.get("lora.alpha_pattern"),
        "use_rslora": identity.get("lora.rslora"),
    }


Found = dict[str, dict[str, torch.Tensor]]


def _by_layer(
    file: Path, tensors: Tensors, layers: Mapping[str, str], pipeline_class: Any
) -> Found:
    """Return A, B and alpha by layer. Raises with every tensor that is none of these, or of no layer."""
    found, unknown, other = _sorted_out(tensors, layers)
    if other:
        raise DitLoraError(
            listed(f"{file}: this takes LoRA matrices (lora_A, lora_B) alone; it has", other)
        )
    if unknown:
        # Forms that join or split layers, as kohya's of FLUX: the pipeline's own loader knows those that it takes.
        converted = _converted(tensors, pipeline_class)
        again = _sorted_out(converted, layers) if converted else None
        if again is None or again[1] or again[2]:
            raise DitLoraError(
                listed(f"{file}: {len(unknown)} of its layers are not in the model", unknown)
            )
        found = again[0]
    if not found:
        raise DitLoraError(f"{file} has no LoRA matrices of a transformer")
    return found


def _sorted_out(tensors: Tensors, layers: Mapping[str, str]) -> tuple[Found, list[str], list[str]]:
    """Return what is found by layer, the file's names of layers that are in no model, and what is no part of a LoRA."""
    found: Found = defaultdict(dict)
    unknown, other = dict[str, None](), []
    for key, tensor in tensors.items():
        matrix, alpha = _MATRIX.fullmatch(key), _ALPHA.fullmatch(key)
        named = matrix or alpha
        if named is None or (matrix is None and tensor.numel() != 1):
            other.append(key)
            continue
        layer = layers.get(named[1])
        if layer is None:
            unknown[f"{named[1]}: not in the model"] = None
            continue
        part = "alpha" if matrix is None else "A" if matrix[2] in _IS_A else "B"
        if part in found[layer]:
            other.append(f"{key}: a second one of {layer}")
        found[layer][part] = tensor
    return found, list(unknown), other


def _converted(tensors: Tensors, pipeline_class: Any) -> dict[str, torch.Tensor] | None:
    """Return the tensors under Diffusers' names with alpha as tensors, as the pipeline reads them; None if it does not."""
    read = lora_pipeline_class(pipeline_class).lora_state_dict
    wants_alphas = "return_alphas" in inspect.signature(read).parameters
    try:
        state = read(dict(tensors), **({"return_alphas": True} if wants_alphas else {}))
    except OF_CONVERTERS:
        return None
    state, alphas = state if isinstance(state, tuple) else (state, None)
    return {**state, **{key: torch.as_tensor(one) for key, one in (alphas or {}).items()}}


def _require_pairs(file: Path, found: Found) -> None:
    lone = [
        f"{name}: no {' and no '.join(f'lora_{part}' for part in 'AB' if part not in own)}"
        for name, own in found.items()
        if not {"A", "B"} <= own.keys()
    ]
    if lone:
        raise DitLoraError(listed(f"{file} is not whole: these layers lack a matrix", lone))


def _misfits(model: nn.Module, layer: str, own: Mapping[str, torch.Tensor]) -> list[str]:
    """Say which of a layer's matrices are not of the sides that its weight and the other one have."""
    module = model.get_submodule(layer)
    if isinstance(module, BaseTunerLayer):  # of a model that has another adapter
        module = module.get_base_layer()
    if isinstance(module, nn.Linear):
        size = [module.out_features, module.in_features]  # a quantised weight has other sides
    elif isinstance(module, nn.Conv2d):
        size = list(module.weight.shape)
    else:
        return [f"{layer}: no linear layer and no 2D convolution"]
    a, b = own["A"], own["B"]
    misfits = []
    # A is (rank, inputs ...) and B (outputs, rank ...): these are the sides that the layer shares.
    for part, tensor, sides in (("A", a, slice(1, None)), ("B", b, slice(0, 1))):
        shape, wanted = list(tensor.shape[sides]), size[sides]
        if shape != wanted:
            words = f"made for {shape}, the model's layer has {wanted}"
            misfits.append(f"{layer}.lora_{part}.weight: {words}")
    if not misfits and list(b.shape[1:]) != [len(a), *([1] * (a.ndim - 2))]:
        misfits.append(f"{layer}: A has rank {len(a)}, B is {list(b.shape)}")
    return misfits


def _alpha(layer: str, own: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> float:
    rank = len(own["A"])
    if "alpha" in own:
        return float(own["alpha"].item())
    if config is None or config.get("lora_alpha") is None:
        return rank
    patterns = config.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(list(patterns), layer), config["lora_alpha"])
    # PEFT divides by the root of the rank then, and by the rank where it has no such word.
    return float(alpha) * math.sqrt(rank) if config.get("use_rslora") else alpha


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
