"""File formats of a LoRA: Diffusers, PEFT, ComfyUI and kohya. Each file is read back after it is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from safetensors.torch import load_file, save_file

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.diffusers_format import (
    BASE_FILE,
    Tensors,
    base_weights,
    header_lines,
    save_adapter,
)
from dit_lora.adapters.kinds import kind_of
from dit_lora.adapters.peft_format import save_chat_adapter
from dit_lora.errors import CheckFailedError, DitLoraError, listed
from dit_lora.families.family import DiffusionFamily
from dit_lora.results.export.hollow import folded, load_lora_file, load_state
from dit_lora.results.export.key_maps import LayerKeys, comfyui_layout, kohya_layout
from dit_lora.results.export.other_kinds import write_other_kind
from dit_lora.results.export.updates import Updates, require_same, updates_of

LoraForm = Literal["diffusers", "folded", "peft", "comfyui", "kohya"]


@dataclass
class Exported:
    """An adapter to be written, attached to a model without weights."""

    model: Any
    made: Mapping[str, Any]
    """The metadata for the header."""
    family: DiffusionFamily
    pipeline_class: Any
    hollow: Callable[[], Any]
    """Builds a new model of the base's architecture without weights."""


def write_form(form: LoraForm, adapter: Exported, out: Path, name: str) -> None:
    """Write an adapter to the new folder `out` in this format, and read it back.

    Args:
        form: The format.
        adapter: The adapter.
        out: The folder.
        name: File name without extension, for formats that do not prescribe one.

    Raises:
        DitLoraError: The family has no such format.
        CheckFailedError: What was read back differs from the adapter.
    """
    model = adapter.model
    # Other kinds than LoRA have fewer formats and tensors of other names.
    if kind_of(model.peft_config[ADAPTER_NAME]) != "lora":
        metadata, family = adapter.made, adapter.family
        write_other_kind(form, model, family, adapter.pipeline_class, metadata, out, name)
        return
    # Read before the folded format replaces the model.
    expected, trained = updates_of(model), base_weights(model)
    # ComfyUI and kohya need other key names; Diffusers and PEFT write their own formats.
    layout = _layout(form, adapter.family, expected)
    if layout is not None:
        _write_layout(form, expected, trained, out / f"{name}.safetensors", layout, adapter.made)
        return
    if form == "peft":
        save_chat_adapter(model, out, adapter.made)
        # Read back with PEFT itself, into a new model without weights.
        wrapped = peft.PeftModel.from_pretrained(adapter.hollow(), str(out))
        require_same(expected, updates_of(wrapped.base_model.model), str(out))
    else:
        if form == "folded":
            model = _refilled(model, adapter.hollow())
        file = save_adapter(model, adapter.pipeline_class, out, adapter.made)
        reloaded = adapter.hollow()
        load_lora_file(reloaded, file, adapter.pipeline_class)
        require_same(expected, updates_of(reloaded), file.name)
        if form == "folded":
            # The folded format exists for loaders that ignore alpha, so it must hold without alpha too.
            _require_without_alpha(expected, file, adapter.hollow())
    _require_weights(trained, out / BASE_FILE)


def _refilled(model: Any, empty: Any) -> Any:
    """Fill an empty model with the folded adapter and the trained base weights."""
    # Attach the rescaled matrices to a fresh model, whose config then says alpha = rank.
    state, config = folded(model)
    load_state(empty, state, config.to_dict(), "the folded adapter", base_weights(model))
    return empty


def _require_without_alpha(expected: Updates, file: Path, empty: Any) -> None:
    """Read the file back as a loader that ignores alpha would, and require the same update."""
    state = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    load_state(empty, state, None, file)
    require_same(expected, updates_of(empty), f"{file.name} without its alpha")


def _require_weights(expected: Mapping[str, torch.Tensor], file: Path) -> None:
    """Raise `CheckFailedError` if the base weights in the file differ from the trained ones."""
    # Both directions: a missing tensor and an extra one are errors alike.
    stored_weights = load_file(file) if file.is_file() else {}
    differing = [
        name
        for name in expected.keys() | stored_weights.keys()
        if name not in expected
        or name not in stored_weights
        or not torch.equal(expected[name], stored_weights[name])
    ]
    if differing:
        raise CheckFailedError(
            listed(f"{file.name}, read back, is not what trained", sorted(differing))
        )


def _write_layout(
    form: str,
    updates: Updates,
    trained: Tensors,
    file: Path,
    layout: LayerKeys,
    made: Mapping[str, Any],
) -> None:
    """Write another program's layout, and read it back."""
    if trained:
        raise DitLoraError(
            listed(
                f"--to {form}: base weights trained too, which a LoRA file of {form} cannot hold; "
                "--to merged takes them; they are",
                sorted(trained),
            )
        )
    metadata = {"format": "pt", **header_lines(made)}
    if form == "kohya":
        metadata |= _kohya_facts(updates, made)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(layout.tensors(updates), file, metadata=metadata)
    # Compare the products B A, since the format may fold the scale into a factor.
    require_same(updates, layout.updates(load_file(file)), file.name)


def _layout(form: str, family: DiffusionFamily, updates: Updates) -> LayerKeys | None:
    """Another program's layout of an adapter's layers; None for Diffusers' and PEFT's formats."""
    try:
        if form == "comfyui":
            return comfyui_layout(family.comfyui, updates)
        return kohya_layout(family.kohya, updates) if form == "kohya" else None
    except DitLoraError as error:
        forms = "diffusers, folded, peft, merged"
        raise DitLoraError(
            f"--to {form} {family.name}: {error}\nfor {family.name} there are: {forms}"
        ) from error


def _kohya_facts(updates: Updates, made: Mapping[str, Any]) -> dict[str, str]:
    """Metadata that kohya's tools show. They write "Dynamic" if layers differ."""
    # One value if all layers agree, as sd-scripts writes it.
    ranks = {terms[0].rank for terms in updates.values()}
    alphas = {round(terms[0].scale * terms[0].rank, 6) for terms in updates.values()}
    facts = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": ranks.pop() if len(ranks) == 1 else "Dynamic",
        "ss_network_alpha": alphas.pop() if len(alphas) == 1 else "Dynamic",
        "ss_sd_model_name": made.get("base_model"),
        "ss_steps": made.get("steps"),
        "ss_seed": made.get("seed"),
    }
    return {key: str(value) for key, value in facts.items() if value is not None}
