"""Finds an adapter to export, what it says of its making, and the base that it was trained on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE, read_provenance
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES
from dit_lora.results.origin import base_of, model_of_run, peft_config, whole_pipeline


@dataclass(frozen=True)
class Source:
    """One diffusion adapter."""

    target: Path
    """The path as the user gave it."""
    file: Path
    """Diffusers' LoRA file, or a PEFT folder's."""
    made: dict[str, Any]
    """The adapter's provenance; empty if it is not ours."""

    def base(self, model: str | None) -> ModelConfig:
        """Return the base: `model`, the run's own, or the Hub id that the adapter names. Raises if there is none."""
        return base_of(self.target, self.file, self.made, model)


def find_source(target: Path) -> Source:
    """Return the adapter of a run's folder, of an adapter's folder, or of the file itself.

    Raises `DitLoraError` for a whole pipeline, and for what holds no adapter.
    """
    if not target.exists():
        raise DitLoraError(f"no file or folder {target}; give a run's folder, or an adapter's")
    file = _adapter_file(target)
    whole = whole_pipeline(target)
    if file is None and whole is not None:
        raise DitLoraError(
            f"{whole} is a whole pipeline, not an adapter: there is nothing to export; "
            "Diffusers loads it with from_pretrained"
        )
    if file is None:
        raise DitLoraError(
            f"no adapter in {target}; give a run's folder, an adapter's folder or a .safetensors file"
        )
    return Source(target, file, read_provenance(file))


def is_chat(target: Path, model: str | None) -> bool:
    """Return true if a target is of a chat model: by the run's recipe, the adapter's header, or PEFT's config."""
    if not target.exists() or whole_pipeline(target):
        return False
    file = _adapter_file(target) or _base_file(target)
    if file is None:
        base = model_of_run(target, None)
        return base.family in CHAT_FAMILIES if base else (target / "config.json").is_file()
    if file.name == ADAPTER_FILE:
        return False
    family = read_provenance(file).get("family")
    if family:
        return family in CHAT_FAMILIES
    # PEFT's format alone does not say: a diffusion adapter exported to it looks the same.
    on_pipeline = model is not None and (Path(model) / "model_index.json").is_file()
    own_class = peft_config(file).get("auto_mapping") or {}
    return not on_pipeline and not own_class.get("parent_library", "").startswith("diffusers.")


def _adapter_file(target: Path) -> Path | None:
    names = (ADAPTER_FILE, SAFETENSORS_WEIGHTS_NAME)
    candidates = [target, *(folder / n for folder in (target, target / "adapter") for n in names)]
    return next((path for path in candidates if path.is_file()), None)


def _base_file(target: Path) -> Path | None:
    """Return the file that a chat run leaves which trained base weights alone."""
    candidates = (folder / BASE_FILE for folder in (target, target / "adapter"))
    return next((path for path in candidates if path.is_file()), None)
