"""Loads an adapter's file into a pipeline: with Diffusers' loaders or PEFT's, else as `lora.init` reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from dit_lora.adapters.attach_file import peft_config
from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE, read_provenance
from dit_lora.adapters.kinds import WITHOUT_DIFFUSERS, kind_of
from dit_lora.adapters.layer_names import UNKNOWN, LayerNames
from dit_lora.adapters.lora_file import OF_CONVERTERS, config_in, is_lora_tensor, read_lora
from dit_lora.adapters.lora_mixins import lora_pipeline_class, with_lora
from dit_lora.adapters.patterns import read_peft_config
from dit_lora.environment.hub_files import result_folder
from dit_lora.errors import DitLoraError, listed
from dit_lora.numerics.adapter_tensors import is_adapter, layer_of

PEFT_FILES = (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME)
"""Files of an adapter in PEFT's format."""
# What Diffusers and PEFT raise of matrices that do not fit a model.
_REFUSALS = (ValueError, RuntimeError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class _Target:
    """A file, and the model of a pipeline that it is for."""

    pipeline: Any
    model: Any
    file: Path
    part: str
    name: str | None = None
    """The adapter's name; None for the loader's own choice."""

    @property
    def where(self) -> Mapping[str, bool]:
        """The arguments that tell Diffusers' loader which model it is."""
        return {} if self.part == "transformer" else {f"load_into_{self.part}": True}


def load_adapter(
    pipeline: Any, adapter: str | Path, comfyui: LayerNames = UNKNOWN, *, name: str | None = None
) -> None:
    """Load an adapter from a folder, a file or the Hub, with what was trained beside it.

    That is base weights, and classes that are new to a model with a class table, names included. A pipeline
    without a LoRA loader gets one (`with_lora`). An adapter that was trained on the second expert of a pipeline goes
    there, as `load_into_transformer_2=True` says to Diffusers. A file of another form than the pipeline's loader takes
    is read layer by layer, also with the family's `comfyui` names. `name` is the adapter's, by default Diffusers'
    choice. Raises `DitLoraError` if the adapter does not fit.
    """
    target = _with_base(pipeline, adapter, name)
    try:
        state = stock_state(type(pipeline), target.file)
    except OF_CONVERTERS:
        state = {}
    is_stock_form = _is_known(pipeline, state) and not is_converted_lora(target.file, state)
    if not in_peft_format(target.file) and not is_stock_form and not _is_base_alone(target.file):
        _put_layers(target, comfyui)
    else:
        _require_layers(target, state)
        try:
            _by_stock(target)
        except _REFUSALS as error:
            reason = str(error).strip().partition("\n")[0]
            name = type(target.model).__name__
            raise DitLoraError(f"{target.file} does not load into {name}: {reason}") from error
    _put_labels(pipeline, target.file)


def load_as_stock(pipeline: Any, adapter: Path) -> None:
    """Load an adapter and base weights beside it with the pipeline's own loader, which may ignore all of it."""
    target = _with_base(pipeline, adapter)
    _by_stock(target)
    _put_labels(pipeline, target.file)


def in_peft_format(file: Path) -> bool:
    """Return true for an adapter of a kind that Diffusers does not read, in a folder as PEFT keeps it."""
    config = file.with_name(CONFIG_NAME)
    if file.name != SAFETENSORS_WEIGHTS_NAME or not config.is_file():
        return False
    return kind_of(read_peft_config(config)) in WITHOUT_DIFFUSERS


def stock_state(pipeline_class: Any, file: Path) -> dict[str, torch.Tensor]:
    """Return a file's tensors by the names that a pipeline's own loader gives them; raises what it raises."""
    if in_peft_format(file):
        return {_in_pipeline(name): tensor for name, tensor in load_file(file).items()}
    loaded = lora_pipeline_class(pipeline_class).lora_state_dict(file.parent, weight_name=file.name)
    state: dict[str, torch.Tensor] = loaded[0] if isinstance(loaded, tuple) else loaded
    return state


def is_converted_lora(file: Path, state: Mapping[str, torch.Tensor]) -> bool:
    """True if a pipeline's loader renamed, split or dropped tensors of a LoRA's file to get this state."""
    with safe_open(file, framework="pt") as opened:
        names = set(opened.keys())
    return names != state.keys() and all(is_lora_tensor(name) for name in names)


def missing_names(pipeline_class: Any, file: Path) -> list[str]:
    """Return the tensors without which a pipeline's loader cannot convert a file's names; empty if that is not why.

    Loaders that know another program's form ask for one name after another, and say the first that is not there.
    """
    convert = lora_pipeline_class(pipeline_class).lora_state_dict
    tensors, missing = load_file(file), list[str]()
    names = list(tensors)
    while True:
        try:
            convert(dict(tensors))
        except KeyError as error:
            name = _as_in_file(str(error.args[0]), names)
            if name in tensors:
                return []
            missing.append(name)
            # In its place, to hear of the next.
            tensors[name] = torch.ones(()) if name.endswith(".alpha") else torch.ones(1, 1)
        except OF_CONVERTERS:
            return missing
        else:
            return missing


def _as_in_file(asked: str, names: list[str]) -> str:
    """Return a name that a converter asked for, with the beginning that it took off the file's names."""
    shared = min(names)[: _alike(min(names), max(names))]
    # Of equal ones the longest: with nothing in common, all that the names share was taken off.
    taken = max(range(len(shared) + 1), key=lambda place: (_alike(shared[place:], asked), place))
    return shared[:taken] + asked


def _alike(one: str, other: str) -> int:
    """Return how many characters two names begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _with_base(pipeline: Any, adapter: str | Path, name: str | None = None) -> _Target:
    """Find the file and its model, and put base weights that lie beside it into that."""
    with_lora(pipeline)
    adapter = result_folder(adapter, (ADAPTER_FILE, BASE_FILE, *PEFT_FILES))
    file = adapter / ADAPTER_FILE if adapter.is_dir() else adapter
    if adapter.is_dir() and in_peft_format(adapter / SAFETENSORS_WEIGHTS_NAME):
        file = adapter / SAFETENSORS_WEIGHTS_NAME
    if not file.is_file():
        raise DitLoraError(f"no adapter at {file}")
    # Diffusers reads the config in the header itself, and PEFT matches what it says.
    with safe_open(file, framework="pt") as opened:
        config_in(opened.metadata() or {}, file)
    part = read_provenance(file).get("part", "transformer")
    model = getattr(pipeline, part, None)
    if model is None:
        raise DitLoraError(
            f"{file} was trained on {part}, which this {type(pipeline).__name__} does not have; "
            "load it into a pipeline "
            "with both experts"
        )
    base = file.with_name(BASE_FILE)
    if base.is_file():
        # Base weights go first, because PEFT renames the weights of the layers that it wraps.
        weights = load_file(base)
        _grow_tables(model, weights)
        _, unexpected = model.load_state_dict(weights, strict=False)
        if unexpected:
            raise DitLoraError(listed(f"{base}: the model has no such weights", unexpected))
    return _Target(pipeline, model, file, part, name)


def _by_stock(target: _Target) -> None:
    file = target.file
    if in_peft_format(file):
        lazy = next(target.model.parameters()).is_meta  # to which no file is read
        device = "cpu" if lazy else str(next(target.model.parameters()).device)
        peft.PeftModel.from_pretrained(
            target.model,
            str(file.parent),
            adapter_name=target.name or "default",
            torch_device=device,
            low_cpu_mem_usage=lazy,
        )
    elif any(".lokr_" in name for name in load_file(file)):
        # Only some pipelines take LoKr by `load_lora_weights`; every model does.
        target.model.load_lora_adapter(
            str(file.parent),
            weight_name=file.name,
            prefix="transformer",
            adapter_name=target.name,
        )
    else:
        target.pipeline.load_lora_weights(
            file.parent, weight_name=file.name, adapter_name=target.name, **target.where
        )


def _in_pipeline(name: str) -> str:
    return f"transformer.{name.removeprefix('base_model.model.')}"


def _is_known(pipeline: Any, state: Mapping[str, torch.Tensor]) -> bool:
    """Return true if the pipeline's loader has names of adapted layers of a model that it loads into."""
    parts = tuple(f"{part}." for part in pipeline._lora_loadable_modules)
    return any(name.startswith(parts) and is_adapter(name) for name in state)


def _is_base_alone(file: Path) -> bool:
    return file.with_name(BASE_FILE).is_file() and not load_file(file)


def _require_layers(target: _Target, state: Mapping[str, torch.Tensor]) -> None:
    """Raise with every layer that the model lacks: Diffusers warns of them, and loads the others."""
    modules = {name for name, _ in target.model.named_modules()}
    layers = dict.fromkeys(
        layer_of(name.removeprefix("transformer."))
        for name in state
        if name.startswith("transformer.") and is_adapter(name)
    )
    unknown = [name for name in layers if name not in modules]
    if unknown:
        name = type(target.model).__name__
        what = f"{target.file} was trained on another model than this {name}; these of its layers are not in the model"
        raise DitLoraError(listed(what, unknown))


def _put_layers(target: _Target, comfyui: LayerNames) -> None:
    """Attach what `read_lora` reads of a file, at the file's own alphas."""
    layers = read_lora(target.file, target.model, comfyui, type(target.pipeline)).layers
    state = {
        f"{name}.lora_{part}.weight": matrix
        for name, layer in layers.items()
        for part, matrix in (("A", layer.a), ("B", layer.b))
    }
    config = peft_config(layers, list(layers)).to_dict()
    target.model.load_lora_adapter(state, prefix=None, metadata=config, adapter_name=target.name)


def _put_labels(pipeline: Any, file: Path) -> None:
    labels = (read_provenance(file).get("index") or {}).get("id2label", {})
    # DiTPipeline splits names in this way: a class may have several.
    if labels and hasattr(pipeline, "labels"):
        pipeline.labels = {
            name.strip(): int(row) for row, names in labels.items() for name in names.split(",")
        }


def _grow_tables(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Make room for the rows that training added to embedding tables, for classes new to the model."""
    for name, module in model.named_modules():
        weight = weights.get(f"{name}.weight")
        if not isinstance(module, nn.Embedding) or weight is None:
            continue
        if len(weight) > module.num_embeddings:
            module.num_embeddings = len(weight)
            module.weight = nn.Parameter(weight.to(module.weight), requires_grad=False)
            # DiT's pipeline looks there for the null row.
            if "num_embeds_ada_norm" in model.config:
                model.register_to_config(num_embeds_ada_norm=len(weight) - 1)
