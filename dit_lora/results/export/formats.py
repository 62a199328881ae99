"""Forms of a LoRA's files: Diffusers', PEFT's, ComfyUI's, kohya's; each is read back once it is written."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from safetensors.torch import load_file, save_file

from dit_lora.adapters.diffusers_format import BASE_FILE, PROVENANCE_KEY, base_weights, save_adapter
from dit_lora.adapters.peft_format import save_chat_adapter
from dit_lora.errors import CheckFailedError, DitLoraError, listed
from dit_lora.results.export.hollow import folded, load_lora_file, load_state
from dit_lora.results.export.key_maps import Layout
from dit_lora.results.export.updates import Updates, require_same, updates_of

LoraForm = Literal["diffusers", "folded", "peft", "comfyui", "kohya"]
Hollow = Callable[[], Any]
"""Makes a new hollow model of the base's architecture."""
LayoutOf = Callable[[Updates], Layout]
"""Another program's layout of an adapter's layers; raises `DitLoraError` where it has none."""


def write_form(
    form: LoraForm,
    model: Any,
    out: Path,
    *,
    hollow: Hollow,
    pipeline_class: Any,
    family: str,
    layout_of: LayoutOf | None,
    made: Mapping[str, Any],
    name: str,
) -> None:
    """Write the adapter of a hollow model to the new folder `out` in that form, and read it back.

    `made` is the provenance for the header; `name` is the file's name in the forms that do not fix it.
    Raises `DitLoraError` if the family has no such form, and `CheckFailedError` if what is read back is not
    the adapter.
    """
    # Taken first, since the folded form puts another model in this one's place.
    expected, trained = updates_of(model), base_weights(model)
    if layout_of is not None:
        layout = _layout(form, family, layout_of, expected)
        _write_layout(form, model, out / f"{name}.safetensors", layout, made)
        return
    if form == "peft":
        save_chat_adapter(model, out, made)
        wrapped = peft.PeftModel.from_pretrained(hollow(), str(out))
        require_same(expected, updates_of(wrapped.base_model.model), str(out))
    else:
        if form == "folded":
            model = _refilled(model, hollow())
        file = save_adapter(model, pipeline_class, out, made)
        again = hollow()
        load_lora_file(again, file, pipeline_class)
        require_same(expected, updates_of(again), file.name)
        if form == "folded":
            _require_without_alpha(expected, file, hollow())
    _require_weights(trained, out / BASE_FILE)


def _refilled(model: Any, empty: Any) -> Any:
    """Fill an empty hollow model with the folded adapter, and with what else trained."""
    state, config = folded(model)
    load_state(empty, state, config.to_dict(), "the folded adapter", base_weights(model))
    return empty


def _require_without_alpha(expected: Updates, file: Path, empty: Any) -> None:
    """Read the file back as a loader that ignores alpha would, and require the same update."""
    state = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    load_state(empty, state, None, file)
    require_same(expected, updates_of(empty), f"{file.name} without its alpha")


def _require_weights(expected: Mapping[str, torch.Tensor], file: Path) -> None:
    stored = load_file(file) if file.is_file() else {}
    differing = [
        name
        for name in expected.keys() | stored.keys()
        if name not in expected
        or name not in stored
        or not torch.equal(expected[name], stored[name])
    ]
    if differing:
        raise CheckFailedError(
            listed(f"{file.name}, read back, is not what trained", sorted(differing))
        )


def _write_layout(
    form: str, model: Any, file: Path, layout: Layout, made: Mapping[str, Any]
) -> None:
    updates = updates_of(model)
    trained = base_weights(model)
    if trained:
        raise DitLoraError(
            listed(
                f"--to {form}: base weights trained too, which a LoRA file of {form} cannot hold; "
                "--to merged takes them; they are",
                sorted(trained),
            )
        )
    metadata = {"format": "pt", PROVENANCE_KEY: json.dumps(dict(made), sort_keys=True)}
    if form == "kohya":
        metadata |= _kohya_facts(updates, made)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(layout.tensors(updates), file, metadata=metadata)
    require_same(updates, layout.updates(load_file(file)), file.name)


def _layout(form: str, family: str, layout_of: LayoutOf, updates: Updates) -> Layout:
    try:
        return layout_of(updates)
    except DitLoraError as error:
        forms = "diffusers, folded, peft, merged"
        raise DitLoraError(
            f"--to {form} {family}: {error}\nfor {family} there are: {forms}"
        ) from error


def _kohya_facts(updates: Updates, made: Mapping[str, Any]) -> dict[str, str]:
    """Return what kohya's tools show of a file; "Dynamic" is what they write where layers differ."""
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
