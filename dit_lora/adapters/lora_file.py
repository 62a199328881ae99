"""Reads a LoRA's file, whoever wrote it: Diffusers' form, PEFT's, ComfyUI's or kohya's; each layer by Diffusers' name.

Rank is a matrix's size. Alpha comes from the file's `.alpha` tensors, else from PEFT's config in its header or beside
it, or from the run if the file is a checkpoint's, else it is the rank. Text encoders' layers, DoRA's magnitudes and
full differences are no part of a transformer's LoRA and are refused by name: a file is read whole or not at all.
"""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
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
from dit_lora.adapters.patterns import read_peft_config, require_bounded_patterns
from dit_lora.adapters.published_names import layers_by_published_spelling, split_rows
from dit_lora.config.lora import FROM_WEIGHT
from dit_lora.config.records import AdapterConfig, CheckpointState, checked, read_typed, typed
from dit_lora.errors import DitLoraError, listed
from dit_lora.numerics.finite import not_finite

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
MAX_TENSORS = 100_000
"""Largest number of tensors of an adapter file. A published one has a few thousand; a million would take minutes."""
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
    config = read_peft_config(beside) if in_peft_format else config_in(header, file)
    of_run = _config_of_checkpoint(file)
    require_bounded_patterns(of_run, file.with_name(STATE_FILE))
    sorted_out = _by_layer(file, tensors, model, comfyui, pipeline_class)
    found = sorted_out.found
    if of_run is not None:
        for name, own in found.items():
            own["alpha"] = torch.tensor(_alpha(name, own, of_run))
    what = f"{file} was trained on another model than this {type(model).__name__}"
    mismatches = sorted_out.mismatches
    mismatches += [words for name, own in found.items() for words in _misfits(model, name, own)]
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


def require_few_tensors(file: Path, names: Collection[str]) -> None:
    """Raise `DitLoraError` if an adapter file has more than `MAX_TENSORS` tensors."""
    if len(names) > MAX_TENSORS:
        raise DitLoraError(f"{file} has {len(names):,} tensors; a LoRA may have {MAX_TENSORS:,}")


def is_lora_tensor(name: str) -> bool:
    """True for a name in a file of A, B or alpha of some layer, of whichever model."""
    return _MATRIX.fullmatch(name) is not None or _ALPHA.fullmatch(name) is not None


def _opened(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        # With values wherever the model is made, on `meta` too.
        with torch.device("cpu"), safe_open(file, framework="pt") as opened:
            require_few_tensors(file, opened.keys())
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
    what = f"{file}: its header's {_METADATA}"
    stored = typed(header.get(_METADATA, "{}"), dict[str, Any], what)
    prefix = "transformer."
    own = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
    own = dict(checked(own, AdapterConfig, what))
    require_bounded_patterns(own, file)
    return own or None


def _config_of_checkpoint(file: Path) -> dict[str, Any] | None:
    """Return what PEFT's config says of alpha in the run whose checkpoint a file is of; None for any other file.

    Raises `DitLoraError` where the checkpoint does not say it either.
    """
    beside = file.with_name(STATE_FILE)
    if file.name != WEIGHTS_FILE or not beside.is_file():
        return None
    identity = read_typed(beside, CheckpointState)["identity"]
    init = identity.get("lora.init")
    if init in FROM_WEIGHT:
        run = file.absolute().parents[2]
        raise DitLoraError(
            f"{file} has what trained of {init} without its start; end the run, and give its folder: {run}"
        )
    if "lora.rank" not in identity:
        run = file.absolute().parents[2]
        raise DitLoraError(
            f"{file} is of a checkpoint that does not say its alpha, "
            f"for its run started from a LoRA's file or trained "
            f"none; end the run, and give its folder: {run}"
        )
    return {
        "lora_alpha": float(identity.get("lora.alpha") or identity["lora.rank"]),
        "alpha_pattern": identity.get("lora.alpha_pattern"),
        "use_rslora": identity.get("lora.rslora"),
    }


Factors = dict[str, torch.Tensor]
"""A, B and alpha of a layer, as far as the file has them."""
Found = dict[str, Factors]


@dataclass
class _Sorted:
    """A file's tensors by layer, and every tensor that is of no layer of the model."""

    found: Found = field(default_factory=dict)
    """Factors by Diffusers' name of the layer."""
    problems: dict[str, list[str]] = field(default_factory=dict)
    """Names from the file, by the reason why they are refused."""
    mismatches: list[str] = field(default_factory=list)

    def refuse(self, reason: str, name: str) -> None:
        self.problems.setdefault(reason, []).append(name)

    def refuse_unknown(self, name: str) -> None:
        if _TEXT_ENCODER_NAME.match(name):
            self.refuse(_TEXT_ENCODER, name)
        else:
            self.refuse(_UNKNOWN, f"{name}: not in the model")


_TEXT_ENCODER, _UNKNOWN = "of a text encoder", "not in the model"
_DUPLICATE, _INCOMPLETE = "there twice", "not whole"
_REASONS = {
    _TEXT_ENCODER: "{count} of its layers are of a text encoder, which takes no LoRA here",
    _UNKNOWN: "{count} of its layers are not in the model",
    _DUPLICATE: "these layers are in it twice",
    _INCOMPLETE: "it is not whole: these layers lack a matrix",
}
_NO_LORA = "this takes LoRA matrices (lora_A, lora_B) alone; it has"
_OTHER_TENSORS = (
    (re.compile(r"\.(dora_scale|lora_magnitude_vector(\.\w+)?|magnitude)(\.|$)"), "DoRA"),
    (re.compile(r"\.(lokr_|hada_|oft_|boft_)"), "LoKr, LoHa or OFT"),
    (re.compile(r"\.(diff|diff_b|set_weight)$"), "a full difference"),
    (re.compile(r"\.lora_mid\."), "a LoCon matrix"),
    (re.compile(r"\.alpha$"), "an alpha of more than one number"),
)
_TEXT_ENCODER_NAME = re.compile(
    r"(base_model\.model\.)?(text_encoders?[._\d]|te\d*\.|cond_stage_model\.|conditioner\.|"
    r"lora_(te\d*|text_encoder\w*|clip\w?|t5\w*|llm|gemma\w*|qwen\w*|mistral\w*)_)"
)


def _by_layer(
    file: Path, tensors: Tensors, model: nn.Module, comfyui: LayerNames, pipeline_class: Any
) -> _Sorted:
    """Sort A, B and alpha by layer. Raises with every tensor that is none of these, or of no layer."""
    spelled = _Spelled.of_model(model, comfyui)
    sorted_out = _sort_out(tensors, spelled)
    if _UNKNOWN in sorted_out.problems and pipeline_class is not None:
        # Forms that only the pipeline's own loader knows.
        converted = _convert(file, tensors, pipeline_class)
        again = _sort_out(converted, spelled) if converted else None
        if again is not None and not again.problems:
            sorted_out = again
    if sorted_out.problems:
        raise DitLoraError(_refusal(file, sorted_out.problems))
    if not sorted_out.found and not sorted_out.mismatches:
        raise DitLoraError(f"{file} has no LoRA matrices of a transformer")
    return sorted_out


@dataclass(frozen=True)
class _Spelled:
    """The names under which a file may have this model's layers."""

    model: nn.Module
    layers: Mapping[str, str]
    published: Mapping[str, list[str]]

    @classmethod
    def of_model(cls, model: nn.Module, comfyui: LayerNames) -> "_Spelled":
        names = [name for name, _ in model.named_modules() if name]
        published = layers_by_published_spelling(model, names)
        return cls(model, layers_by_spelling(names, comfyui), published)


def _sort_out(tensors: Tensors, spelled: _Spelled) -> _Sorted:
    sorted_out, seen = _Sorted(), set[str]()
    for name, factors in _group(tensors, sorted_out).items():
        layers = [spelled.layers[name]] if name in spelled.layers else spelled.published.get(name)
        lone = [f"no lora_{part}" for part in "AB" if part not in factors]
        if layers is None:
            sorted_out.refuse_unknown(name)
        elif twice := [layer for layer in layers if layer in seen]:
            sorted_out.refuse(_DUPLICATE, f"{name}: a second one of {', '.join(twice)}")
        elif lone:
            alone = ", its alpha is alone" if len(lone) == 2 else ""
            sorted_out.refuse(_INCOMPLETE, f"{', '.join(layers)}: {' and '.join(lone)}{alone}")
        elif name in spelled.layers:
            sorted_out.found[layers[0]] = factors
        else:
            _add_published(sorted_out, spelled.model, name, layers, factors)
        seen.update(layers or ())
    return sorted_out


def _add_published(
    sorted_out: _Sorted, model: nn.Module, name: str, layers: list[str], factors: Factors
) -> None:
    """Add the parts of a published model's layer: they share A and alpha, and each has its rows of B."""
    sizes = [_weight_size(model, layer) for layer in layers]
    rows = [size[0] if size else 0 for size in sizes]
    if len(factors["B"]) != sum(rows):
        words = f"made for {len(factors['B'])} outputs, the model's {', '.join(layers)} have {sum(rows)}"
        sorted_out.mismatches.append(f"{name}.lora_B.weight: {words}")
        return
    parts = split_rows(model, layers, factors["B"], rows)
    for layer, b in zip(layers, parts, strict=True):
        sorted_out.found[layer] = {**factors, "B": b}


def _group(tensors: Tensors, sorted_out: _Sorted) -> Found:
    """Group a file's tensors by its own names of layers, and refuse those that are no part of a LoRA."""
    groups: Found = defaultdict(dict)
    for key, tensor in tensors.items():
        matrix, alpha = _MATRIX.fullmatch(key), _ALPHA.fullmatch(key)
        if matrix is not None:
            name, part = matrix[1], "A" if matrix[2] in _IS_A else "B"
        elif alpha is not None and tensor.numel() == 1:
            name, part = alpha[1], "alpha"
        else:
            is_text = _TEXT_ENCODER_NAME.match(key)
            kind = next((words for form, words in _OTHER_TENSORS if form.search(key)), "")
            said = f"{key}: {kind}" if kind else key
            sorted_out.refuse(*((_TEXT_ENCODER, key) if is_text else (_NO_LORA, said)))
            continue
        if part in groups[name]:
            sorted_out.refuse(_DUPLICATE, f"{key}: a second lora_{part} of {name}")
        groups[name][part] = tensor
    return groups


def _refusal(file: Path, problems: Mapping[str, list[str]]) -> str:
    """Say in one line why a file is refused, and list the names that are the reason and no others."""
    reasons = [
        _REASONS.get(reason, reason).format(count=len(names)) for reason, names in problems.items()
    ]
    return listed(
        f"{file}: {'; '.join(reasons)}", [name for names in problems.values() for name in names]
    )


def _convert(file: Path, tensors: Tensors, pipeline_class: Any) -> dict[str, torch.Tensor] | None:
    """Convert a file with the pipeline's own loader; None if it does not know the form.

    Diffusers' converters drop some tensors without a word, and some alphas. So alpha goes into B before, and a
    backward through the conversion finds every tensor without a part in the result. Raises `DitLoraError` with these.
    """
    folded = _fold_alphas(tensors)
    if folded is None:
        return None
    leaves = {name: tensor.detach().float().requires_grad_() for name, tensor in folded.items()}
    try:
        with torch.enable_grad():
            state = lora_pipeline_class(pipeline_class).lora_state_dict(dict(leaves))
            state = state[0] if isinstance(state, tuple) else state
            reached = [tensor.sum() for tensor in state.values() if tensor.requires_grad]
            if not reached:
                return None
            gradients = torch.autograd.grad(
                torch.stack(reached).sum(), list(leaves.values()), allow_unused=True
            )
    except OF_CONVERTERS:
        return None
    dropped = [name for name, grad in zip(leaves, gradients, strict=True) if grad is None]
    if dropped:
        what = f"{file}: {pipeline_class.__name__} takes the others of its tensors and would drop these"
        raise DitLoraError(listed(what, dropped))
    return {name: tensor.detach() for name, tensor in state.items()}


def _fold_alphas(tensors: Tensors) -> dict[str, torch.Tensor] | None:
    """Multiply alpha over rank into B; None where a tensor is no LoRA matrix or an alpha has no factors."""
    unsorted = _Sorted()
    groups = _group(tensors, unsorted)
    if unsorted.problems or any(not {"A", "B"} <= factors.keys() for factors in groups.values()):
        return None
    folded = {}
    for key, tensor in tensors.items():
        matrix = _MATRIX.fullmatch(key)
        if matrix is None:
            continue
        factors = groups[matrix[1]]
        scale = 1.0
        if matrix[2] not in _IS_A and "alpha" in factors:
            scale = float(factors["alpha"].item()) / len(factors["A"])
        folded[key] = tensor * scale
    return folded


def _weight_size(model: nn.Module, layer: str) -> list[int] | None:
    """Size of a layer's weight, (outputs, inputs, ...); None if it is no linear layer and no 2D convolution."""
    module = model.get_submodule(layer)
    if isinstance(module, BaseTunerLayer):  # of a model that has another adapter
        module = module.get_base_layer()
    if isinstance(module, nn.Linear):
        return [module.out_features, module.in_features]  # a quantised weight has other sides
    return list(module.weight.shape) if isinstance(module, nn.Conv2d) else None


def _misfits(model: nn.Module, layer: str, own: Mapping[str, torch.Tensor]) -> list[str]:
    """Say which of a layer's matrices are not of the sides that its weight and the other one have."""
    size = _weight_size(model, layer)
    if size is None:
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
