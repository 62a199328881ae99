"""Read LoRA files of any program: Diffusers' form, PEFT's, ComfyUI's or kohya's. Layers get Diffusers' names.

The rank is the size of a matrix. Alpha comes from the file's `.alpha` tensors, else from PEFT's config in its header
or in the same folder, or from the run if the file belongs to a checkpoint; else it is the rank. Layers of text
encoders, DoRA's magnitudes and full differences are not part of a transformer's LoRA. Files with them are refused, and
the message lists the names: a file is read completely or not at all.
"""

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
from torch import nn

from dit_lora.adapters.layer_names import LayerNames, map_spellings_to_layers
from dit_lora.adapters.lora_mixins import get_lora_pipeline_class
from dit_lora.adapters.patterns import read_peft_config, require_bounded_regex_patterns
from dit_lora.adapters.published_names import map_published_spellings, split_joined_lora_b
from dit_lora.config.lora import WEIGHT_INITS
from dit_lora.config.records import AdapterConfig, CheckpointState, parse_typed_json, read_typed_json, validate_value
from dit_lora.environment.safetensors_files import read_metadata, read_tensors
from dit_lora.errors import DitLoraError, format_list
from dit_lora.files import compute_sha256
from dit_lora.numerics.finite import describe_nonfinite_tensors

# A or B as PEFT, kohya or Diffusers' older versions name it, with or without the adapter's name.
_MATRIX_NAME = re.compile(r"(.+)\.(lora_A|lora_down|lora\.down|lora_B|lora_up|lora\.up)(?:\.default)?\.weight")
_ALPHA_NAME = re.compile(r"(.+)\.alpha")
_NAMES_OF_A = ("lora_A", "lora_down", "lora.down")
# Exceptions that Diffusers' converters raise for unknown names and sizes: FLUX's converter has its sizes built in.
CONVERTER_ERRORS = (ValueError, LookupError, AttributeError, RuntimeError, AssertionError)
WEIGHTS_FILE, AVERAGES_FILE, STATE_FILE = "trainable.safetensors", "ema.safetensors", "state.json"
"""Files of a run's checkpoint: trained weights, their moving averages, and the state with the run's settings."""
_METADATA_KEY = "lora_adapter_metadata"  # the key of PEFT's config in a header that Diffusers wrote


Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StoredLayer:
    """The LoRA matrices and alpha of one layer in a file, in fp32."""

    a: torch.Tensor
    """(rank, inputs); for a convolution (rank, inputs, height, width)."""
    b: torch.Tensor
    """(outputs, rank); for a convolution (outputs, rank, 1, 1)."""
    alpha: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file as read for one model: matrices by layer, PEFT's config and digests."""

    file: Path
    config: Mapping[str, Any] | None
    """PEFT's config from the file; None without one, and if the file has alpha as tensors."""
    layers: Mapping[str, StoredLayer]
    """Layers by their names in the model."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the file, and of PEFT's config if that is a separate file."""


def read_lora(file: Path, model: nn.Module, comfyui: LayerNames, pipeline_class: Any) -> LoraFile:
    """Read a LoRA file for a model. The model may be on `meta` and may have adapters.

    Raises `DitLoraError` that lists every name without a layer and every wrong shape, and for files that are not
    safetensors or have values that are not finite.
    """
    header, tensors = read_metadata(file), read_trained_tensors(file)
    # PEFT's config comes from its own file, or from the header.
    config_file = file.with_name(CONFIG_NAME)
    in_peft_format = file.name == SAFETENSORS_WEIGHTS_NAME and config_file.is_file()
    config = read_peft_config(config_file) if in_peft_format else parse_header_config(header, file)
    checkpoint_config = _read_checkpoint_config(file)
    require_bounded_regex_patterns(checkpoint_config, file.with_name(STATE_FILE))
    # Tensors by layer, with the model's names.
    sorted_out = _sort_by_layer(file, tensors, model, comfyui, pipeline_class)
    factors_by_layer = sorted_out.factors_by_layer
    # A checkpoint's file has no alpha: it comes from the run's settings.
    if checkpoint_config is not None:
        for name, factors in factors_by_layer.items():
            factors["alpha"] = torch.tensor(_get_alpha(name, factors, checkpoint_config))
    # Report all shapes at once.
    mismatches = sorted_out.mismatches
    for name, factors in factors_by_layer.items():
        mismatches += _find_shape_mismatches(model, name, factors)
    if mismatches:
        message = f"{file} was trained on a different model than this {type(model).__name__}"
        raise DitLoraError(format_list(message, mismatches))
    bad = describe_nonfinite_tensors(list(tensors.items()))
    if bad:
        raise DitLoraError(format_list(f"{file}: these tensors are not finite", bad))
    layers = {
        # fp32, whatever the file has: training continues in fp32.
        name: StoredLayer(factors["A"].float(), factors["B"].float(), _get_alpha(name, factors, config))
        for name, factors in sorted(factors_by_layer.items())
    }
    files = {"sha256": file} | ({"config_sha256": config_file} if in_peft_format else {})
    if any("alpha" in factors for factors in factors_by_layer.values()):
        config = None  # its alpha is not used
    digests = {name: compute_sha256(path) for name, path in files.items()}
    return LoraFile(file, config, layers, digests)


def is_lora_tensor(name: str) -> bool:
    """True if a tensor's name in a file is that of a LoRA's A, B or alpha, for a layer of any model."""
    return _MATRIX_NAME.fullmatch(name) is not None or _ALPHA_NAME.fullmatch(name) is not None


def read_trained_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Read a file's tensors. For a run's checkpoint, moving averages replace the weights if the run keeps them."""
    tensors, averages = read_tensors(file), file.with_name(AVERAGES_FILE)
    if file.name == WEIGHTS_FILE and averages.is_file():
        # The run samples, evaluates and exports the averages, too.
        tensors |= {name.removeprefix("ema/"): tensor for name, tensor in read_tensors(averages).items()}
    return tensors


def parse_header_config(header: Mapping[str, str], file: Path) -> dict[str, Any] | None:
    """PEFT's config of the transformer's adapter, from a header that Diffusers wrote; None without one."""
    description = f"{file}: its header's {_METADATA_KEY}"
    stored = parse_typed_json(header.get(_METADATA_KEY, "{}"), dict[str, Any], description)
    # Diffusers writes the configs of all components into one mapping, each key with its component.
    prefix = "transformer."
    config = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
    config = dict(validate_value(config, AdapterConfig, description))
    require_bounded_regex_patterns(config, file)
    return config or None


def _read_checkpoint_config(file: Path) -> dict[str, Any] | None:
    """The keys of PEFT's config that set alpha, from the run whose checkpoint this file belongs to; None for other
    files.

    Raises `DitLoraError` if the checkpoint does not say it either.
    """
    state_file = file.with_name(STATE_FILE)
    if file.name != WEIGHTS_FILE or not state_file.is_file():
        return None
    # The settings that the run's trajectory depends on, by recipe key.
    identity = read_typed_json(state_file, CheckpointState)["identity"]
    init = identity.get("lora.init")
    if init in WEIGHT_INITS:
        # RUN/checkpoints/STEP/trainable.safetensors.
        run = file.absolute().parents[2]
        raise DitLoraError(
            f"{file} has what trained of {init} without its start; end the run, and give its folder: {run}"
        )
    if "lora.rank" not in identity:
        run = file.absolute().parents[2]
        raise DitLoraError(
            f"{file} is of a checkpoint that does not say its alpha, for its run started from a LoRA's file or "
            f"trained none; end the run, and give its folder: {run}"
        )
    return {
        "lora_alpha": float(identity.get("lora.alpha") or identity["lora.rank"]),
        "alpha_pattern": identity.get("lora.alpha_pattern"),
        "use_rslora": identity.get("lora.rslora"),
    }


Factors = dict[str, torch.Tensor]
"""Those of A, B and alpha that the file has for a layer."""
FactorsByLayer = dict[str, Factors]


@dataclass
class _SortedTensors:
    """Tensors of a LoRA file, sorted by the model's layers, and problems with the others."""

    factors_by_layer: FactorsByLayer = field(default_factory=dict)
    """Factors by Diffusers' layer name."""
    problems: dict[str, list[str]] = field(default_factory=dict)
    """Names from the file, by the reason for refusing them."""
    mismatches: list[str] = field(default_factory=list)

    def add_tensor_problem(self, reason: str, name: str) -> None:
        self.problems.setdefault(reason, []).append(name)

    def add_unknown_name_problem(self, name: str) -> None:
        if _TEXT_ENCODER_NAME.match(name):
            self.add_tensor_problem(_TEXT_ENCODER, name)
        else:
            self.add_tensor_problem(_UNKNOWN, f"{name}: not in the model")


_TEXT_ENCODER, _UNKNOWN = "of a text encoder", "not in the model"
_DUPLICATE, _INCOMPLETE = "there twice", "not whole"
_REASONS = {
    _TEXT_ENCODER: "{count} of its layers belong to a text encoder, which is not trained here",
    _UNKNOWN: "{count} of its layers are not in the model",
    _DUPLICATE: "it contains these layers twice",
    _INCOMPLETE: "it is incomplete: a matrix is missing in these layers",
}
_NOT_LORA = "only LoRA matrices (lora_A, lora_B) are supported here; it has"
_OTHER_TENSORS = (
    (re.compile(r"\.(dora_scale|lora_magnitude_vector(\.\w+)?|magnitude)(\.|$)"), "DoRA"),
    (re.compile(r"\.(lokr_|hada_|oft_|boft_)"), "LoKr, LoHa or OFT"),
    # ComfyUI's forms for a whole weight or bias.
    (re.compile(r"\.(diff|diff_b|set_weight)$"), "a full difference"),
    (re.compile(r"\.lora_mid\."), "a LoCon matrix"),
    (re.compile(r"\.alpha$"), "an alpha of more than one number"),
)
# Prefixes of text encoders, with dots and, in kohya's layout, with underscores.
_TEXT_ENCODER_NAME = re.compile(
    r"(base_model\.model\.)?(text_encoders?[._\d]|te\d*\.|cond_stage_model\.|conditioner\.|"
    r"lora_(te\d*|text_encoder\w*|clip\w?|t5\w*|llm|gemma\w*|qwen\w*|mistral\w*)_)"
)


def _sort_by_layer(
    file: Path, tensors: Tensors, model: nn.Module, comfyui: LayerNames, pipeline_class: Any
) -> _SortedTensors:
    """Sort A, B and alpha of a LoRA file by layer. Raises `DitLoraError` that lists all other tensors."""
    # First without conversion: names of Diffusers, PEFT, ComfyUI, kohya and the published model.
    spelled = _LayerNameLookup.from_model(model, comfyui)
    sorted_out = _sort_tensors(tensors, spelled)
    if _UNKNOWN in sorted_out.problems and pipeline_class is not None:
        # The file may have a form that only the pipeline's own loader knows.
        converted = _convert_with_pipeline(file, tensors, pipeline_class)
        converted_layers = _sort_tensors(converted, spelled) if converted else None
        # If the conversion leaves problems too, the first attempt's are reported, with the file's own names.
        if converted_layers is not None and not converted_layers.problems:
            sorted_out = converted_layers
    problems = sorted_out.problems
    if problems:
        reasons = [_REASONS.get(reason, reason).format(count=len(names)) for reason, names in problems.items()]
        names = [name for names in problems.values() for name in names]
        raise DitLoraError(format_list(f"{file}: {'; '.join(reasons)}", names))
    if not sorted_out.factors_by_layer and not sorted_out.mismatches:
        raise DitLoraError(f"{file} has no LoRA matrices of a transformer")
    return sorted_out


@dataclass(frozen=True)
class _LayerNameLookup:
    """Layer names that LoRA files may use for one model, mapped to the model's own layers."""

    model: nn.Module
    layers: Mapping[str, str]
    published_layers: Mapping[str, list[str]]

    @classmethod
    def from_model(cls, model: nn.Module, comfyui: LayerNames) -> "_LayerNameLookup":
        names = [name for name, _ in model.named_modules() if name]
        published = map_published_spellings(model, names)
        return cls(model, map_spellings_to_layers(names, comfyui), published)


def _sort_tensors(tensors: Tensors, model_names: _LayerNameLookup) -> _SortedTensors:
    sorted_out, seen_layers = _SortedTensors(), set[str]()
    for name, factors in _group_by_layer_name(tensors, sorted_out).items():
        layers = [model_names.layers[name]] if name in model_names.layers else model_names.published_layers.get(name)
        # Alpha is optional.
        missing_parts = [f"no lora_{part}" for part in "AB" if part not in factors]
        if layers is None:
            sorted_out.add_unknown_name_problem(name)
        elif repeated_layers := [layer for layer in layers if layer in seen_layers]:
            sorted_out.add_tensor_problem(_DUPLICATE, f"{name}: a second one of {', '.join(repeated_layers)}")
        elif missing_parts:
            suffix = ", its alpha is alone" if len(missing_parts) == 2 else ""
            sorted_out.add_tensor_problem(_INCOMPLETE, f"{', '.join(layers)}: {' and '.join(missing_parts)}{suffix}")
        elif name in model_names.layers:
            # A name of Diffusers' or ComfyUI's layer stands for one layer.
            sorted_out.factors_by_layer[layers[0]] = factors
        else:
            _add_joined_layer_lora(sorted_out, model_names.model, name, layers, factors)
        # A layer may occur in one spelling only.
        seen_layers.update(layers or ())
    return sorted_out


def _add_joined_layer_lora(
    sorted_tensors: _SortedTensors, model: nn.Module, name: str, layers: list[str], factors: Factors
) -> None:
    """Add the LoRA of a layer that the published model fuses and Diffusers splits.

    Parts share A and alpha; B is split by row.
    """
    sizes = [_get_weight_shape(model, layer) for layer in layers]
    # Output rows of each layer, in the order in which the joined layer has them.
    rows = [size[0] if size else 0 for size in sizes]
    # B is (outputs of all parts together, rank).
    if len(factors["B"]) != sum(rows):
        message = f"made for {len(factors['B'])} outputs, the model's {', '.join(layers)} have {sum(rows)}"
        sorted_tensors.mismatches.append(f"{name}.lora_B.weight: {message}")
        return
    parts = split_joined_lora_b(model, layers, factors["B"], rows)
    for layer, b in zip(layers, parts, strict=True):
        sorted_tensors.factors_by_layer[layer] = {**factors, "B": b}


def _group_by_layer_name(tensors: Tensors, sorted_tensors: _SortedTensors) -> FactorsByLayer:
    """Group a LoRA file's tensors by its own layer names, and record those that are not part of a LoRA as problems."""
    groups: FactorsByLayer = defaultdict(dict)
    for key, tensor in tensors.items():
        # Group 1 is the layer's name, group 2 of a matrix its kind.
        matrix, alpha = _MATRIX_NAME.fullmatch(key), _ALPHA_NAME.fullmatch(key)
        if matrix is not None:
            name, part = matrix[1], "A" if matrix[2] in _NAMES_OF_A else "B"
        elif alpha is not None and tensor.numel() == 1:
            name, part = alpha[1], "alpha"
        else:
            # Tensors of a text encoder are refused for that reason, whatever they are.
            is_text = _TEXT_ENCODER_NAME.match(key)
            kind = next((label for form, label in _OTHER_TENSORS if form.search(key)), "")
            description = f"{key}: {kind}" if kind else key
            sorted_tensors.add_tensor_problem(*((_TEXT_ENCODER, key) if is_text else (_NOT_LORA, description)))
            continue
        if part in groups[name]:
            sorted_tensors.add_tensor_problem(_DUPLICATE, f"{key}: a second lora_{part} of {name}")
        groups[name][part] = tensor
    return groups


def _convert_with_pipeline(file: Path, tensors: Tensors, pipeline_class: Any) -> dict[str, torch.Tensor] | None:
    """Convert a file with the pipeline's own loader; None if the loader does not know the form.

    Diffusers' converters silently drop some tensors and some alphas. So alpha is multiplied into B before the
    conversion, and a backward pass through it finds all tensors that do not reach the result. Raises `DitLoraError`
    that lists them.
    """
    folded = _fold_alpha_into_b(tensors)
    if folded is None:
        return None
    # Leaves of a graph through the conversion, which copies, splits and joins tensors.
    leaves = {name: tensor.detach().float().requires_grad_() for name, tensor in folded.items()}
    try:
        with torch.enable_grad():
            state = get_lora_pipeline_class(pipeline_class).lora_state_dict(dict(leaves))
            state = state[0] if isinstance(state, tuple) else state
            # Results that do not require a gradient were made by the converter itself.
            reached = [tensor.sum() for tensor in state.values() if tensor.requires_grad]
            if not reached:
                return None
            gradients = torch.autograd.grad(torch.stack(reached).sum(), list(leaves.values()), allow_unused=True)
    except CONVERTER_ERRORS:
        return None
    # No gradient: no result depends on this tensor.
    dropped = [name for name, grad in zip(leaves, gradients, strict=True) if grad is None]
    if dropped:
        message = f"{file}: {pipeline_class.__name__} takes the others of its tensors and would drop these"
        raise DitLoraError(format_list(message, dropped))
    return {name: tensor.detach() for name, tensor in state.items()}


def _fold_alpha_into_b(tensors: Tensors) -> dict[str, torch.Tensor] | None:
    """Multiply alpha / rank into each B of a LoRA.

    None if a tensor is not part of a LoRA or an alpha has no matrices.
    """
    unsorted = _SortedTensors()
    groups = _group_by_layer_name(tensors, unsorted)
    if unsorted.problems or any(not {"A", "B"} <= factors.keys() for factors in groups.values()):
        return None
    folded = {}
    for key, tensor in tensors.items():
        matrix = _MATRIX_NAME.fullmatch(key)
        if matrix is None:
            continue
        factors = groups[matrix[1]]
        scale = 1.0
        # The scale belongs into the product once, so only B is multiplied.
        if matrix[2] not in _NAMES_OF_A and "alpha" in factors:
            # A has one row per rank.
            scale = float(factors["alpha"].item()) / len(factors["A"])
        folded[key] = tensor * scale
    return folded


def _get_weight_shape(model: nn.Module, layer: str) -> list[int] | None:
    """Shape of a layer's weight, (outputs, inputs, ...); None for anything but linear layers and 2D convolutions."""
    module = model.get_submodule(layer)
    if isinstance(module, BaseTunerLayer):  # the model has another adapter
        module = module.get_base_layer()
    if isinstance(module, nn.Linear):
        # Not `weight.shape`, which is another one for a quantized weight.
        return [module.out_features, module.in_features]
    return list(module.weight.shape) if isinstance(module, nn.Conv2d) else None


def _find_shape_mismatches(model: nn.Module, layer: str, factors: Mapping[str, torch.Tensor]) -> list[str]:
    """Messages about a layer's matrices whose shapes do not fit the layer's weight or each other."""
    size = _get_weight_shape(model, layer)
    if size is None:
        return [f"{layer}: no linear layer and no 2D convolution"]
    a, b = factors["A"], factors["B"]
    # Ranks are compared only if inputs and outputs fit.
    misfits = []
    # A is (rank, inputs, ...) and B (outputs, rank, ...): compare inputs and outputs with the layer.
    for part, tensor, sides in (("A", a, slice(1, None)), ("B", b, slice(0, 1))):
        shape, expected = list(tensor.shape[sides]), size[sides]
        if shape != expected:
            message = f"made for {shape}, the model's layer has {expected}"
            misfits.append(f"{layer}.lora_{part}.weight: {message}")
    if not misfits and list(b.shape[1:]) != [len(a), *([1] * (a.ndim - 2))]:
        misfits.append(f"{layer}: A has rank {len(a)}, B is {list(b.shape)}")
    return misfits


def _get_alpha(layer: str, factors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> float:
    rank = len(factors["A"])
    if "alpha" in factors:
        return float(factors["alpha"].item())
    if config is None or config.get("lora_alpha") is None:
        return rank
    # As in PEFT: the first matching pattern decides, else `lora_alpha`.
    patterns = config.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(list(patterns), layer), config["lora_alpha"])
    # With rsLoRA, PEFT's scale is alpha / sqrt(rank). Ours is alpha / rank, so alpha is adjusted.
    return float(alpha) * math.sqrt(rank) if config.get("use_rslora") else alpha
