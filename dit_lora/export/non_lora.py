"""Reads and writes adapter files of other kinds than LoRA (LoKr, LoHa, OFT, DoRA ...), on models without weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import CONFIG_NAME

from dit_lora.adapters.attach import ADAPTER_NAME, get_adapter_state
from dit_lora.adapters.diffusers_format import (
    BASE_FILE,
    build_header_entries,
    get_base_weights,
    require_valid_tensors,
    save_adapter,
)
from dit_lora.adapters.kinds import create_peft_config, get_adapter_kind
from dit_lora.adapters.layer_names import LayerNames
from dit_lora.adapters.lora_file import STATE_FILE, WEIGHTS_FILE, parse_header_config, read_trained_tensors
from dit_lora.adapters.patterns import read_peft_config
from dit_lora.adapters.peft_format import save_chat_adapter
from dit_lora.config.load import load_recipe
from dit_lora.config.lora import PEFT_ONLY_KINDS
from dit_lora.environment.safetensors_files import read_metadata, read_tensors, write_tensors
from dit_lora.errors import CheckFailedError, DitLoraError, format_list
from dit_lora.export.meta_model import load_base_weights, read_base_weights, unfreeze_weights
from dit_lora.families.family import DiffusionFamily
from dit_lora.numerics.adapter_tensors import get_layer_name, is_adapter_tensor

Config = Mapping[str, Any]
_LOAD_ERRORS = (ValueError, TypeError, KeyError, RuntimeError)
# The scale is folded into this factor: ComfyUI applies `alpha` to a LoKr only if a factor is a product.
_SCALED_FACTORS = ("lokr_w1", "lokr_w1_a", "hada_w1_a")


def find_non_lora_kind(file: Path) -> str | None:
    """The kind of an adapter's file if it is not a LoRA; None for a LoRA, and for a file without a kind."""
    kind = get_adapter_kind(_read_config(file))
    return None if kind == "lora" else kind


def load_non_lora_adapter(model: Any, file: Path) -> None:
    """Load an adapter file, and base weights in it or next to it, into a meta model, as `load_lora_file` does.

    Raises:
        DitLoraError: The file does not fit.
        CheckFailedError: A tensor is not finite, or the adapter has no effect.
    """
    config = dict(_read_config(file) or {})
    # Files come from PEFT, Diffusers or a run's checkpoint, and each adds other prefixes.
    tensors = {_strip_wrapper_names(name): tensor for name, tensor in read_trained_tensors(file).items()}
    # A checkpoint's file holds adapter and base weights together.
    adapter_tensors = {name: tensor for name, tensor in tensors.items() if is_adapter_tensor(name)}
    weights = {name: tensor for name, tensor in tensors.items() if name not in adapter_tensors}
    base = file.with_name(BASE_FILE)
    weights |= read_base_weights(base, model) if base.is_file() else {}
    layers = list(dict.fromkeys(map(get_layer_name, adapter_tensors)))
    modules = {name for name, _ in model.named_modules()}
    absent = [f"{name}: not in the model" for name in layers if name not in modules]
    if absent:
        summary = f"{file} was trained on another model than this {type(model).__name__}"
        raise DitLoraError(format_list(summary, absent))
    require_valid_tensors(adapter_tensors, weights)
    load_base_weights(model, weights)
    # The tensors decide which layers are adapted, whatever targets the config has.
    adapter_config = _build_peft_config(config, layers)
    try:
        peft.inject_adapter_in_model(adapter_config, model, adapter_name=ADAPTER_NAME)
        peft.set_peft_model_state_dict(model, dict(adapter_tensors), adapter_name=ADAPTER_NAME)
    except _LOAD_ERRORS as error:
        reason = str(error).strip().splitlines()[0]
        raise DitLoraError(f"{file} does not load into {type(model).__name__}: {reason}") from error
    unfreeze_weights(model, weights)
    # `set_peft_model_state_dict` leaves missing tensors at their initial values without an error.
    lacking = [f"{name}: not in the file" for name in get_adapter_state(model) if name not in adapter_tensors]
    if lacking:
        raise DitLoraError(format_list(f"{file} is not whole", lacking))


def write_non_lora_adapter(
    export_format: str,
    model: Any,
    family: DiffusionFamily,
    pipeline_class: Any,
    metadata: Config,
    output_dir: Path,
    name: str,
) -> None:
    """Write an adapter of another kind than LoRA in a format that supports it, and read it back.

    Raises:
        DitLoraError: The format does not support this kind; lists those that do.
    """
    # Diffusers reads only some kinds, and ComfyUI only LyCORIS' LoKr and LoHa.
    kind = get_adapter_kind(model.peft_config[ADAPTER_NAME])
    forms = ["peft", "merged"]
    if kind not in PEFT_ONLY_KINDS:
        forms.append("diffusers")
    if kind in ("lokr", "loha"):
        forms.append("comfyui")
    if export_format not in forms or export_format == "merged":
        raise DitLoraError(f"--to {export_format}: nothing reads {kind} in this form; there are: {', '.join(forms)}")
    if export_format == "comfyui":
        _write_comfyui(model, family.comfyui, output_dir / f"{name}.safetensors", metadata)
        return
    if export_format == "peft":
        file = save_chat_adapter(model, output_dir, metadata)
    else:
        file = save_adapter(model, pipeline_class, output_dir, metadata)
    stored_tensors = {_strip_wrapper_names(key): tensor for key, tensor in read_tensors(file).items()}
    _require_same_tensors(get_adapter_state(model), stored_tensors, file)


def _write_comfyui(model: Any, names: LayerNames, file: Path, metadata: Config) -> None:
    """Write LyCORIS' tensors with ComfyUI's layer names (comfy/weight_adapter/lokr.py, loha.py)."""
    if names.unsupported_reason:
        raise DitLoraError(f"--to comfyui: {names.unsupported_reason}")
    trained = sorted(get_base_weights(model))
    if trained:
        problem = "base weights trained too, which such a file cannot hold"
        raise DitLoraError(format_list(f"--to comfyui: {problem}; --to merged takes them; they are", trained))
    state = get_adapter_state(model)
    # ComfyUI's name of each adapted layer; None if it has none.
    counterparts = {layer: names.translate_layer_name(layer) for layer in map(get_layer_name, state)}
    unknown = [layer for layer, comfyui_name in counterparts.items() if comfyui_name is None]
    if unknown:
        raise DitLoraError(format_list("--to comfyui: ComfyUI's model has no counterpart of these layers", unknown))
    tensors = {}
    for name, tensor in state.items():
        layer = get_layer_name(name)
        # The rest of the name is LyCORIS' factor, such as `lokr_w1` or `hada_w2_b`.
        factor = name.removeprefix(f"{layer}.")
        scale = model.get_submodule(layer).scaling[ADAPTER_NAME] if factor in _SCALED_FACTORS else 1.0
        tensors[f"{counterparts[layer]}.{factor}"] = (tensor * scale).contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, file, {"format": "pt", **build_header_entries(metadata)})
    _require_same_tensors(tensors, read_tensors(file), file)


def _read_config(file: Path) -> Config | None:
    """PEFT's config of an adapter file.

    It comes from the folder, from its header, or, for a run's checkpoint, from the recipe.
    """
    # A run's checkpoint has no PEFT config: rebuild it from the recipe of the run.
    config_file, state = file.with_name(CONFIG_NAME), file.with_name(STATE_FILE)
    if file.name == WEIGHTS_FILE and state.is_file():
        recipe = file.absolute().parents[2] / "config.yaml"
        lora = load_recipe(recipe).lora if recipe.is_file() else None
        return create_peft_config(lora, []).to_dict() if lora and lora.kind != "lora" else None
    if config_file.is_file():
        return read_peft_config(config_file)
    return parse_header_config(read_metadata(file), file)


def _build_peft_config(config: Config, layers: list[str]) -> peft.PeftConfig:
    """PEFT's config for exactly these layers, without fields of other PEFT versions and without local paths."""
    # PEFT has DoRA as an option of LoRA, not as a separate type.
    kind: Any = {"dora": "LORA"}.get(get_adapter_kind(config), get_adapter_kind(config).upper())
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    # These three are set by PEFT itself, or name a path of another machine.
    fields = config_class.__dataclass_fields__.keys() - {"peft_type", "base_model_name_or_path", "auto_mapping"}
    values = {key: value for key, value in config.items() if key in fields}
    peft_config: peft.PeftConfig = config_class(**{**values, "target_modules": layers, "inference_mode": False})
    return peft_config


def _strip_wrapper_names(name: str) -> str:
    """A tensor's name in an unwrapped model, as PEFT writes it without the adapter's name."""
    for prefix in ("base_model.model.", "transformer."):
        name = name.removeprefix(prefix)
    # A run's checkpoint uses the names of the wrapped parameters.
    return name.replace(f".{ADAPTER_NAME}", "") if is_adapter_tensor(name) else name.replace(".base_layer.", ".")


def _require_same_tensors(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], file: Path
) -> None:
    """Raise `CheckFailedError` with every tensor that is not bit-identical to the expected one."""
    faults = [f"{name}: not in it" for name in expected if name not in actual]
    faults += [f"{name}: not in the adapter" for name in actual if name not in expected]
    common_names = expected.keys() & actual.keys()
    differing = (name for name in common_names if not torch.equal(expected[name].cpu(), actual[name].cpu()))
    faults += [f"{name}: other values" for name in differing]
    if faults:
        raise CheckFailedError(format_list(f"{file}, read back, is not the adapter", sorted(faults)))
