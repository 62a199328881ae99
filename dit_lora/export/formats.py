"""File formats of a LoRA: Diffusers, PEFT, ComfyUI and kohya. Each file is read back after it is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import peft
import torch

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.diffusers_format import BASE_FILE, Tensors, build_header_entries, get_base_weights, save_adapter
from dit_lora.adapters.kinds import get_adapter_kind
from dit_lora.adapters.peft_format import save_chat_adapter
from dit_lora.environment.safetensors_files import read_tensors, write_tensors
from dit_lora.errors import CheckFailedError, DitLoraError, format_list
from dit_lora.export.key_maps import LayerTensorNames, build_comfyui_layout, build_kohya_layout
from dit_lora.export.meta_model import fold_alpha_into_b, load_lora_file, load_lora_state
from dit_lora.export.non_lora import write_non_lora_adapter
from dit_lora.export.weight_delta import Updates, collect_weight_updates, require_same_updates
from dit_lora.families.family import DiffusionFamily

LoraFormat = Literal["diffusers", "folded", "peft", "comfyui", "kohya"]


@dataclass
class ExportedAdapter:
    """An adapter to be written, attached to a model without weights."""

    model: Any
    metadata: Mapping[str, Any]
    """The metadata for the header."""
    family: DiffusionFamily
    pipeline_class: Any
    build_empty_model: Callable[[], Any]
    """Builds a new model of the base's architecture without weights."""


def write_exported_adapter(export_format: LoraFormat, adapter: ExportedAdapter, output_dir: Path, name: str) -> None:
    """Write an adapter to the new folder `output_dir` in this format, and read it back.

    Args:
        export_format: The format.
        adapter: The adapter.
        output_dir: The folder.
        name: File name without extension, for formats that do not prescribe one.

    Raises:
        DitLoraError: The family has no such format.
        CheckFailedError: What was read back differs from the adapter.
    """
    model = adapter.model
    # Other kinds than LoRA have fewer formats and tensors of other names.
    if get_adapter_kind(model.peft_config[ADAPTER_NAME]) != "lora":
        write_non_lora_adapter(
            export_format, model, adapter.family, adapter.pipeline_class, adapter.metadata, output_dir, name
        )
        return
    # Read before the folded format replaces the model.
    expected, trained = collect_weight_updates(model), get_base_weights(model)
    # ComfyUI and kohya need other key names; Diffusers and PEFT write their own formats.
    layout = _choose_layout(export_format, adapter.family, expected)
    if layout is not None:
        _write_layout(export_format, expected, trained, output_dir / f"{name}.safetensors", layout, adapter.metadata)
        return
    if export_format == "peft":
        save_chat_adapter(model, output_dir, adapter.metadata)
        # Read back with PEFT itself, into a new model without weights.
        wrapped = peft.PeftModel.from_pretrained(adapter.build_empty_model(), str(output_dir))
        require_same_updates(expected, collect_weight_updates(wrapped.base_model.model), str(output_dir))
    else:
        if export_format == "folded":
            # Attach the rescaled matrices to a new model, whose config then says alpha = rank.
            folded_model, (state, config) = adapter.build_empty_model(), fold_alpha_into_b(model)
            load_lora_state(folded_model, state, config.to_dict(), "the folded adapter", trained)
            model = folded_model
        file = save_adapter(model, adapter.pipeline_class, output_dir, adapter.metadata)
        reloaded = adapter.build_empty_model()
        load_lora_file(reloaded, file, adapter.pipeline_class)
        require_same_updates(expected, collect_weight_updates(reloaded), file.name)
        if export_format == "folded":
            # The folded format exists for loaders that ignore alpha, so it must hold without alpha too.
            state = {key.removeprefix("transformer."): tensor for key, tensor in read_tensors(file).items()}
            reloaded = adapter.build_empty_model()
            load_lora_state(reloaded, state, None, file)
            require_same_updates(expected, collect_weight_updates(reloaded), f"{file.name} without its alpha")
    _require_same_weights(trained, output_dir / BASE_FILE)


def _require_same_weights(expected: Mapping[str, torch.Tensor], file: Path) -> None:
    """Raise `CheckFailedError` if the base weights in the file differ from the trained ones."""
    # Both directions: a missing tensor and an extra one are errors alike.
    stored_weights = read_tensors(file, missing_ok=True)
    differing = [
        name
        for name in expected.keys() | stored_weights.keys()
        if name not in expected or name not in stored_weights or not torch.equal(expected[name], stored_weights[name])
    ]
    if differing:
        raise CheckFailedError(format_list(f"{file.name}, read back, is not what trained", sorted(differing)))


def _write_layout(
    export_format: str,
    updates: Updates,
    trained_weights: Tensors,
    file: Path,
    layout: LayerTensorNames,
    adapter_metadata: Mapping[str, Any],
) -> None:
    if trained_weights:
        problem = f"base weights trained too, which a LoRA file of {export_format} cannot hold"
        summary = f"--to {export_format}: {problem}; --to merged takes them; they are"
        raise DitLoraError(format_list(summary, sorted(trained_weights)))
    metadata = {"format": "pt", **build_header_entries(adapter_metadata)}
    if export_format == "kohya":
        metadata |= _build_kohya_metadata(updates, adapter_metadata)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(layout.build_lora_tensors(updates), file, metadata)
    # Compare the products B A, since the format may fold the scale into a factor.
    require_same_updates(updates, layout.read_lora_updates(read_tensors(file)), file.name)


def _choose_layout(export_format: str, family: DiffusionFamily, updates: Updates) -> LayerTensorNames | None:
    """Another program's layout of an adapter's layers in a file; None for Diffusers' and PEFT's formats."""
    try:
        if export_format == "comfyui":
            return build_comfyui_layout(family.comfyui, updates)
        return build_kohya_layout(family.has_kohya_layout, updates) if export_format == "kohya" else None
    except DitLoraError as error:
        forms = f"for {family.name} there are: diffusers, folded, peft, merged"
        raise DitLoraError(f"--to {export_format} {family.name}: {error}\n{forms}") from error


def _build_kohya_metadata(updates: Updates, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Metadata that kohya's tools show. They write "Dynamic" if layers differ."""
    # One value if all layers agree, as sd-scripts writes it.
    ranks = {terms[0].rank for terms in updates.values()}
    alphas = {round(terms[0].scale * terms[0].rank, 6) for terms in updates.values()}
    facts = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": ranks.pop() if len(ranks) == 1 else "Dynamic",
        "ss_network_alpha": alphas.pop() if len(alphas) == 1 else "Dynamic",
        "ss_sd_model_name": metadata.get("base_model"),
        "ss_steps": metadata.get("steps"),
        "ss_seed": metadata.get("seed"),
    }
    return {key: str(value) for key, value in facts.items() if value is not None}
