"""Finds where a result came from: a whole pipeline, the run that an adapter lies in, the family of a base."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME

from dit_lora.adapters.diffusers_format import ADAPTER_FILE
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import DIFFUSION_FAMILIES, get_family
from dit_lora.families.base import local_checkpoint, read_component_config
from dit_lora.parsing import read_json


def whole_pipeline(target: Path) -> Path | None:
    """Return the pipeline's folder, of a run in mode `full` or the target itself; None if it is none."""
    folders = (path for path in (target, target / "model") if (path / "model_index.json").is_file())
    return next(folders, None)


def find_adapter(target: Path) -> Path:
    """Return the file in Diffusers' format of a run's folder, an adapter's folder or the file itself.

    Raises `DitLoraError` where there is none.
    """
    candidates = [target, target / ADAPTER_FILE, target / "adapter" / ADAPTER_FILE]
    adapter = next((path for path in candidates if path.is_file()), None)
    if adapter is not None:
        return adapter
    if any((path / CONFIG_NAME).is_file() for path in (target, target / "adapter", target.parent)):
        raise DitLoraError(
            f"{target} holds an adapter in PEFT's format: a chat model's answers by dit-lora chat; of a diffusion "
            f"model, write what its pipeline loads: dit-lora export {target} --to diffusers --out OUT"
        )
    raise DitLoraError(
        f"no adapter in {target}; give a run's folder, an adapter's folder or a .safetensors file"
    )


def model_of_run(target: Path, file: Path | None) -> ModelConfig | None:
    """Return the base by the recipe of the run that is the target, or that the adapter's file lies in."""
    run = target if target.is_dir() else target.parent
    # An adapter's file given by itself still lies in its run.
    if file and file.parent.name == "adapter":
        run = file.parent.parent
    config = run / "config.yaml"
    return load_recipe(config).model if config.is_file() else None


def base_of(target: Path, file: Path, made: Mapping[str, Any], model: str | None) -> ModelConfig:
    """Return an adapter's base, with a family: `model`, that of the run it lies in, or the Hub id that it names.

    `made` is its provenance, empty if it is not ours. Raises `DitLoraError` where nothing says it.
    """
    recorded = model_of_run(target, file)
    family = made.get("family") or (recorded.family if recorded else "")
    if model:
        base = ModelConfig(family=family, path=model)
    elif recorded is not None:
        base = recorded
    else:
        named = named_base(file, made.get("base_model") or peft_base(file.parent))
        base = ModelConfig(family=family, path=named, revision=made.get("revision"))
    return base if base.family else base.model_copy(update={"family": family_of(base)})


def named_base(target: Path, named: str) -> str:
    """Return the Hub id by which a result names its base. Raises `DitLoraError` where that is no more than a name."""
    # A Hub id has an owner; a name alone is that of a local folder.
    if "/" in named:
        return named
    hint = f" (trained on {named})" if named else ""
    raise DitLoraError(f"{target} does not say where its base model{hint} is; give --model")


def peft_base(folder: Path) -> str:
    """Return the base that an adapter's folder in PEFT's format names, or nothing."""
    return peft_config(folder / CONFIG_NAME).get("base_model_name_or_path") or ""


def peft_config(file: Path) -> dict[str, Any]:
    """Return the adapter_config.json beside a file in PEFT's format; empty without."""
    config = file.with_name(CONFIG_NAME)
    return read_json(config) if config.is_file() else {}


def family_of(model: ModelConfig) -> str:
    """Return the diffusion family whose pipeline a checkpoint names, for an adapter that does not say its own."""
    pipeline = read_component_config(local_checkpoint(model)).get("_class_name")
    families = {name: get_family(name).pipeline_names for name in DIFFUSION_FAMILIES}
    for name, pipelines in families.items():
        if pipeline in pipelines:
            return name
    names = sorted({one for pipelines in families.values() for one in pipelines})
    raise DitLoraError(
        f"{model.path} is a {pipeline} checkpoint; families have those of {', '.join(names)}"
    )
