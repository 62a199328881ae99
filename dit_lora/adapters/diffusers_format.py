"""Save adapters in Diffusers' format, with rank and alpha in the file's metadata.

Without this metadata a loader assumes alpha = rank. An adapter that was trained with alpha 64 and rank 128 would then
act at twice its strength.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.groups import base_parameters
from dit_lora.adapters.kinds import DROPOUTS
from dit_lora.adapters.lora_file import require_few_tensors
from dit_lora.adapters.lora_mixins import lora_pipeline_class
from dit_lora.adapters.own_files import copy_own
from dit_lora.adapters.start import saved_config, saved_state
from dit_lora.config.records import Provenance, typed
from dit_lora.errors import CheckFailedError, DitLoraError, listed
from dit_lora.files import read_json, share_weights
from dit_lora.numerics.adapter_tensors import is_idle
from dit_lora.numerics.dtensors import stock_class

ADAPTER_FILE = "pytorch_lora_weights.safetensors"  # diffusers' LORA_WEIGHT_NAME_SAFE
BASE_FILE = "base_weights.safetensors"
PROVENANCE_KEY = "dit_lora"
# For in-context LoRAs. Lightricks/LTX-2 (ltx_pipelines/ic_lora.py) and ComfyUI-LTXVideo (iclora.py) read this key from
# the header, as a number in text, and default to 1.
DOWNSCALE = "reference_downscale_factor"
# For whole pipelines. An adapter has its provenance in the header.
PROVENANCE_FILE = "dit_lora.json"

Tensors = Mapping[str, torch.Tensor]


def save_adapter(
    transformer: nn.Module,
    pipeline_class: Any,
    out: Path,
    provenance: Mapping[str, Any],
    weights: Tensors | None = None,
) -> Path:
    """Write `out/pytorch_lora_weights.safetensors`, and `base_weights.safetensors` if base weights were trained.

    Args:
        transformer: The trained model.
        pipeline_class: Its `save_lora_weights` decides names and metadata.
        out: Folder; an adapter in it is replaced.
        provenance: Added to the header.
        weights: Full trained weights by name, if those of the model are sharded over ranks.

    Returns the adapter's path. Raises `CheckFailedError`, before anything is written, for an adapter that is not
    finite or has no effect.
    """
    # PEFT's names without the adapter's name, from `weights` if given.
    trained = peft.get_peft_model_state_dict(transformer, weights, adapter_name=ADAPTER_NAME)
    lora = saved_state(transformer, trained)
    base = base_weights(transformer, weights)
    require_sound(lora, base)
    out.mkdir(parents=True, exist_ok=True)
    # Written to a temporary folder first, so that a failure leaves an earlier adapter intact.
    staged = out / ".staged"
    # JSON has no sets. They are sorted, because equal adapters must give equal files.
    config = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in saved_config(transformer, ADAPTER_NAME).to_dict().items()
    }
    # Diffusers leaves a loaded adapter in training mode, so its dropout would act on every sample.
    config |= {key: 0.0 for key in DROPOUTS if key in config}
    lora_pipeline_class(pipeline_class).save_lora_weights(
        staged, transformer_lora_layers=lora, transformer_lora_adapter_metadata=config
    )
    with safe_open(staged / ADAPTER_FILE, framework="pt") as file:
        metadata = dict(file.metadata())
    # Diffusers has written rank and alpha into the metadata.
    metadata |= header_lines(provenance)
    # safetensors cannot change metadata in place, so the file is written again.
    tensors = load_file(staged / ADAPTER_FILE)
    save_file(tensors, staged / ADAPTER_FILE, metadata=metadata)
    if base:
        # safetensors refuses tensors that are not contiguous.
        host = {name: tensor.cpu().contiguous() for name, tensor in base.items()}
        save_file(host, staged / BASE_FILE, metadata=metadata)
    unstage(staged, out, (BASE_FILE, ADAPTER_FILE))
    return out / ADAPTER_FILE


def header_lines(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Entries for a safetensors header: the whole provenance as JSON, and keys that other programs look for."""
    lines = {PROVENANCE_KEY: json.dumps(dict(provenance), sort_keys=True)}
    # Values in a safetensors header are strings.
    return lines | {key: str(provenance[key]) for key in (DOWNSCALE,) if key in provenance}


def unstage(staged: Path, out: Path, names: Sequence[str]) -> None:
    """Move these files from the folder `staged` to `out`. Files that were not written are removed from `out`."""
    share_weights(staged)
    for name in names:
        if (staged / name).exists():
            (staged / name).replace(out / name)
        else:
            # A file of this name is from an earlier run.
            (out / name).unlink(missing_ok=True)
    # Raises if the folder is not empty: then a written file is missing from `names`.
    staged.rmdir()


def save_pipeline(
    transformer: Any,
    base: Path,
    out: Path,
    provenance: Mapping[str, Any],
    index: Mapping[str, Any],
    weights: Tensors | None = None,
    part: str = "transformer",
) -> Path:
    """Write a whole pipeline to `out`: the checkpoint `base` with this transformer as its `part`.

    The components that the base's model_index.json names are copied, and no other files in the folder. Entries of
    `index` replace the base's. The folder is written under a temporary name and renamed. `weights` are those of
    `save_adapter`. Raises `CheckFailedError` for values that are not finite.
    """
    if weights is not None:
        # The sharded model cannot be saved itself.
        transformer = _holding(transformer, weights)
    require_sound({}, dict(transformer.named_parameters()))
    staged = out.with_name(f".{out.name}.partial")
    # An interrupted run may have left this folder.
    shutil.rmtree(staged, ignore_errors=True)
    # Every component but the trained one, which is written below.
    copy_own(base, staged, lambda name: not name.startswith(f"{part}/"))
    transformer.save_pretrained(staged / part, safe_serialization=True)
    model_index = read_json(base / "model_index.json")
    (staged / "model_index.json").write_text(json.dumps({**model_index, **index}, indent=2) + "\n")
    (staged / PROVENANCE_FILE).write_text(json.dumps(dict(provenance), indent=2) + "\n")
    share_weights(staged)
    # The new folder is complete now, so the old one can be replaced.
    shutil.rmtree(out, ignore_errors=True)
    staged.rename(out)
    return out


def base_weights(model: nn.Module, weights: Tensors | None = None) -> dict[str, torch.Tensor]:
    """The trained base weights, by their names in a model without adapters; taken from `weights` if given."""
    trained = base_parameters(model)
    if weights is None:
        return {name: parameter.detach() for name, parameter in trained.items()}
    # PEFT wraps an adapted layer and moves its weight to `base_layer`.
    plain_names = {name.replace(".base_layer.", "."): tensor for name, tensor in weights.items()}
    return {name: plain_names[name] for name in trained}


def _holding(model: Any, weights: Tensors) -> nn.Module:
    """A model of the same config that holds `weights` without a copy of them."""
    holder: nn.Module = stock_class(model).from_config(model.config)  # type: ignore[attr-defined]
    # `weights` has parameters only; the model's state dict also has buffers that it computes.
    tables = {name: table for name, table in model.named_buffers() if name in holder.state_dict()}
    holder.load_state_dict({**weights, **tables}, assign=True)
    return holder


def require_sound(
    lora: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Raise `CheckFailedError` if a tensor is not finite, or if the adapter has no effect because every B is zero."""
    bad = [
        name
        for name, tensor in {**lora, **(base or {})}.items()
        if not torch.isfinite(tensor).all()
    ]
    if bad:
        raise CheckFailedError(listed("refused to save: these tensors are not finite", bad))
    idle = {name: tensor for name, tensor in lora.items() if is_idle(name)}
    # These factors are zero before the first step; if all still are, nothing was trained.
    if idle and not any(tensor.any() for tensor in idle.values()):
        factor = "B matrix" if any("lora_B" in name for name in idle) else "last factor"
        raise CheckFailedError(
            f"refused to save: every {factor} is zero, so the adapter has no effect; no gradient reached it"
        )


def read_provenance(file: Path) -> dict[str, Any]:
    """The provenance that a run wrote into the adapter's header; empty for files of other programs."""
    try:
        with safe_open(file, framework="pt") as opened:
            # Before anything else is read: the file may come from a stranger.
            require_few_tensors(file, opened.keys())
            text = (opened.metadata() or {}).get(PROVENANCE_KEY, "{}")
    except (OSError, ValueError, SafetensorError) as error:
        raise DitLoraError(f"{file} is not a safetensors adapter: {error}") from error
    return dict(typed(text, Provenance, f"{file}: its header's {PROVENANCE_KEY}"))
