"""Load an adapter file into a pipeline, with Diffusers' or PEFT's loaders, else layer by layer as for `lora.init`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from torch import nn

from dit_lora.adapters.attach_file import build_peft_config
from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE, read_run_metadata
from dit_lora.adapters.kinds import get_adapter_kind
from dit_lora.adapters.layer_names import UNKNOWN_NAMES, LayerNames
from dit_lora.adapters.lora_file import CONVERTER_ERRORS, is_lora_tensor, parse_header_config, read_lora
from dit_lora.adapters.lora_mixins import get_lora_pipeline_class, with_lora
from dit_lora.adapters.patterns import read_peft_config
from dit_lora.config.lora import PEFT_ONLY_KINDS
from dit_lora.environment.hub_files import resolve_result_folder
from dit_lora.environment.safetensors_files import read_header, read_metadata, read_tensors
from dit_lora.errors import DitLoraError, format_list
from dit_lora.numerics.adapter_tensors import get_layer_name, is_adapter_tensor

PEFT_FILES = (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME)
"""Files of an adapter in PEFT's format."""
# Exceptions that Diffusers and PEFT raise for matrices that do not fit a model.
_LOADER_ERRORS = (ValueError, RuntimeError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class _LoadTarget:
    """An adapter file and the model of a pipeline that it is loaded into."""

    pipeline: Any
    model: Any
    file: Path
    part: str
    name: str | None = None
    """The adapter's name; None for the loader's default."""

    @property
    def loader_kwargs(self) -> Mapping[str, bool]:
        """Arguments that tell the pipeline's `load_lora_weights` which of its models to load into."""
        return {} if self.part == "transformer" else {f"load_into_{self.part}": True}


def load_adapter(
    pipeline: Any, adapter: str | Path, comfyui: LayerNames = UNKNOWN_NAMES, *, name: str | None = None
) -> None:
    """Load an adapter from a folder, a file or the Hub into a pipeline, with base weights that were trained with it.

    Args:
        pipeline: A pipeline without a LoRA loader gets one (`with_lora`).
        adapter: Path, or name on the Hub.
        comfyui: The family's names in ComfyUI, for files that the pipeline's own loader cannot read.
        name: The adapter's name; by default Diffusers chooses it.

    Classes that are new to a model with a class table are added, with their names. An adapter of the second expert is
    loaded into that expert, as with `load_into_transformer_2=True` in Diffusers. Raises `DitLoraError` if the adapter
    does not fit.
    """
    # Base weights are in the pipeline after this.
    target = _find_adapter_and_model(pipeline, adapter, name)
    try:
        state = read_pipeline_state_dict(type(pipeline), target.file)
    except CONVERTER_ERRORS:
        # The pipeline's loader cannot read the file: the reader below knows more forms.
        state = {}
    # Names begin with the component, such as `transformer.`.
    parts = tuple(f"{part}." for part in pipeline._lora_loadable_modules)
    has_known_layers = any(name.startswith(parts) and is_adapter_tensor(name) for name in state)
    # Files that the pipeline's loader would convert are read layer by layer: converters may drop tensors.
    is_stock_form = has_known_layers and not is_converted_lora(target.file, state)
    if not is_in_peft_format(target.file) and not is_stock_form and not _has_only_base_weights(target.file):
        _attach_lora_file_layers(target, comfyui)
    else:
        _require_existing_layers(target, state)
        try:
            _run_pipeline_loader(target)
        except _LOADER_ERRORS as error:
            # The first line: PyTorch's error lists every mismatching tensor after it.
            reason = str(error).strip().partition("\n")[0]
            name = type(target.model).__name__
            raise DitLoraError(f"{target.file} does not load into {name}: {reason}") from error
    _set_class_labels(pipeline, target.file)


def load_with_pipeline_loader(pipeline: Any, adapter: Path) -> None:
    """Load an adapter and its base weights with the pipeline's own loader, which may silently ignore it."""
    target = _find_adapter_and_model(pipeline, adapter)
    _run_pipeline_loader(target)
    _set_class_labels(pipeline, target.file)


def is_in_peft_format(file: Path) -> bool:
    """True if a file belongs to an adapter folder in PEFT's format, of an adapter kind that Diffusers cannot read."""
    config = file.with_name(CONFIG_NAME)
    if file.name != SAFETENSORS_WEIGHTS_NAME or not config.is_file():
        return False
    return get_adapter_kind(read_peft_config(config)) in PEFT_ONLY_KINDS


def read_pipeline_state_dict(pipeline_class: Any, file: Path) -> dict[str, torch.Tensor]:
    """Tensors of a LoRA file, by the names that the pipeline's own loader gives them. Raises that loader's errors."""
    if is_in_peft_format(file):
        tensors = read_tensors(file)
        return {f"transformer.{name.removeprefix('base_model.model.')}": tensor for name, tensor in tensors.items()}
    loaded = get_lora_pipeline_class(pipeline_class).lora_state_dict(file.parent, weight_name=file.name)
    return loaded[0] if isinstance(loaded, tuple) else loaded


def is_converted_lora(file: Path, state: Mapping[str, torch.Tensor]) -> bool:
    """True if a pipeline's loader renamed, split or dropped tensors of a LoRA's file to get this state."""
    names = read_header(file).tensors.keys()
    return names != state.keys() and all(is_lora_tensor(name) for name in names)


def find_missing_names(pipeline_class: Any, file: Path) -> list[str]:
    """Tensors that a pipeline's loader needs to convert a file's names and that the file lacks.

    Empty if the conversion fails for another reason. Such loaders read names one after another and report only the
    first that is missing, so the conversion is repeated with a placeholder for each.
    """
    # Given tensors instead of a file, the method only converts names.
    convert = get_lora_pipeline_class(pipeline_class).lora_state_dict
    tensors, missing = read_tensors(file), list[str]()
    names = list(tensors)
    while True:
        try:
            convert(dict(tensors))
        except KeyError as error:
            name = _complete_tensor_name(str(error.args[0]), names)
            if name in tensors:
                return []
            missing.append(name)
            # A placeholder, so that the next attempt reports the next missing name.
            tensors[name] = torch.ones(()) if name.endswith(".alpha") else torch.ones(1, 1)
        except CONVERTER_ERRORS:
            return missing
        else:
            return missing


def _complete_tensor_name(requested_name: str, names: list[str]) -> str:
    """Complete a tensor name that Diffusers' converter did not find.

    The converter had removed a prefix from the file's names, which is added again.
    """
    # The common prefix of all names is that of the smallest and the largest.
    shared = min(names)[: _count_common_characters(min(names), max(names))]
    # If several are equally good, take the longest: then the converter removed the whole common prefix.
    num_removed = max(
        range(len(shared) + 1), key=lambda start: (_count_common_characters(shared[start:], requested_name), start)
    )
    return shared[:num_removed] + requested_name


def _count_common_characters(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _find_adapter_and_model(pipeline: Any, adapter: str | Path, name: str | None = None) -> _LoadTarget:
    """Find the adapter file and its model, and load base weights that were saved with it."""
    # In place: DiT, Latte and PixArt have no LoRA methods of their own.
    with_lora(pipeline)
    adapter = resolve_result_folder(adapter, (ADAPTER_FILE, BASE_FILE, *PEFT_FILES))
    file = adapter / ADAPTER_FILE if adapter.is_dir() else adapter
    if adapter.is_dir() and is_in_peft_format(adapter / SAFETENSORS_WEIGHTS_NAME):
        file = adapter / SAFETENSORS_WEIGHTS_NAME
    if not file.is_file():
        raise DitLoraError(f"no adapter at {file}")
    # Check the config in the header: Diffusers reads it too, and PEFT matches its patterns.
    parse_header_config(read_metadata(file), file)
    part = read_run_metadata(file).get("part", "transformer")
    model = getattr(pipeline, part, None)
    if model is None:
        raise DitLoraError(
            f"{file} was trained on {part}, which this {type(pipeline).__name__} does not have; load a "
            "pipeline with both experts"
        )
    base = file.with_name(BASE_FILE)
    if base.is_file():
        # Base weights are loaded first, because PEFT renames the weights of the layers that it wraps.
        weights = read_tensors(base)
        _enlarge_embeddings(model, weights)
        # Missing names are expected: the file has only the trained weights.
        _, unexpected = model.load_state_dict(weights, strict=False)
        if unexpected:
            raise DitLoraError(format_list(f"{base}: the model has no such weights", unexpected))
    return _LoadTarget(pipeline, model, file, part, name)


def _run_pipeline_loader(target: _LoadTarget) -> None:
    file = target.file
    if is_in_peft_format(file):
        lazy = next(target.model.parameters()).is_meta  # `meta` is not a device to load files to
        device = "cpu" if lazy else str(next(target.model.parameters()).device)
        peft.PeftModel.from_pretrained(
            target.model,
            str(file.parent),
            adapter_name=target.name or "default",
            torch_device=device,
            low_cpu_mem_usage=lazy,
        )
    elif any(".lokr_" in name for name in read_header(file).tensors):
        # Only some pipelines load LoKr with `load_lora_weights`, but every model can.
        target.model.load_lora_adapter(
            str(file.parent), weight_name=file.name, prefix="transformer", adapter_name=target.name
        )
    else:
        target.pipeline.load_lora_weights(
            file.parent, weight_name=file.name, adapter_name=target.name, **target.loader_kwargs
        )


def _has_only_base_weights(file: Path) -> bool:
    return file.with_name(BASE_FILE).is_file() and not read_header(file).tensors


def _require_existing_layers(target: _LoadTarget, state: Mapping[str, torch.Tensor]) -> None:
    """Raise `DitLoraError` that lists all layers the model lacks. Diffusers would warn and load the others."""
    modules = dict(target.model.named_modules())
    # Names of layers without duplicates, in the file's order.
    layers = dict.fromkeys(
        get_layer_name(name.removeprefix("transformer."))
        for name in state
        if name.startswith("transformer.") and is_adapter_tensor(name)
    )
    unknown = [name for name in layers if name not in modules]
    if unknown:
        name = type(target.model).__name__
        text = f"{target.file} was trained on a different model than this {name}; the model does not have these layers"
        raise DitLoraError(format_list(text, unknown))


def _attach_lora_file_layers(target: _LoadTarget, comfyui: LayerNames) -> None:
    """Attach the layers that `read_lora` finds in a file, with the file's alphas."""
    layers = read_lora(target.file, target.model, comfyui, type(target.pipeline)).layers
    # Names as in PEFT's state dicts, for a loader that expects no prefix.
    state = {
        f"{name}.lora_{part}.weight": matrix
        for name, layer in layers.items()
        for part, matrix in (("A", layer.a), ("B", layer.b))
    }
    config = build_peft_config(layers, list(layers)).to_dict()
    target.model.load_lora_adapter(state, prefix=None, metadata=config, adapter_name=target.name)


def _set_class_labels(pipeline: Any, file: Path) -> None:
    # Class names by row of the class table.
    labels = (read_run_metadata(file).get("index") or {}).get("id2label", {})
    # DiTPipeline splits names at commas, too: a class may have several names.
    if labels and hasattr(pipeline, "labels"):
        pipeline.labels = {name.strip(): int(row) for row, names in labels.items() for name in names.split(",")}


def _enlarge_embeddings(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Enlarge embedding tables for the rows that training added, for classes new to the model."""
    for name, module in model.named_modules():
        weight = weights.get(f"{name}.weight")
        if not isinstance(module, nn.Embedding) or weight is None:
            continue
        if len(weight) > module.num_embeddings:
            # The parameter is replaced, and `load_state_dict` fills it afterwards.
            module.num_embeddings = len(weight)
            module.weight = nn.Parameter(weight.to(module.weight), requires_grad=False)
            # DiT's pipeline computes the null class from this value.
            if "num_embeds_ada_norm" in model.config:
                model.register_to_config(num_embeds_ada_norm=len(weight) - 1)
