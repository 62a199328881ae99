"""Where a result came from: a whole pipeline, the run that an adapter lies in, the family of a base checkpoint."""

from pathlib import Path

from peft.utils import CONFIG_NAME

from dit_lora.adapters.store import ADAPTER_FILE
from dit_lora.config import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import DIFFUSION_FAMILIES, get_family
from dit_lora.families.base import local_checkpoint, read_component_config
from dit_lora.recipe import load_recipe


def whole_pipeline(target: Path) -> Path | None:
    """The pipeline's folder: of a run in mode `full`, or the target itself."""
    found = (path for path in (target, target / "model") if (path / "model_index.json").is_file())
    return next(found, None)


def find_adapter(target: Path) -> Path:
    """The file in Diffusers' format of a run's folder, an adapter's folder or the file itself."""
    candidates = [target, target / ADAPTER_FILE, target / "adapter" / ADAPTER_FILE]
    found = next((path for path in candidates if path.is_file()), None)
    if found is not None:
        return found
    if any((path / CONFIG_NAME).is_file() for path in (target, target / "adapter", target.parent)):
        raise DitLoraError(
            f"{target} holds an adapter in PEFT's format: a chat model's answers by dit-lora chat; of a diffusion "
            f"model, write what its pipeline loads: dit-lora export {target} --to diffusers --out OUT"
        )
    raise DitLoraError(
        f"no adapter in {target}; give a run's folder, an adapter's folder or a .safetensors file"
    )


def model_of_run(target: Path, file: Path | None) -> ModelConfig | None:
    """The base by the recipe of the run that is the target, or that the adapter's file lies in."""
    run = file.parent.parent if file and file.parent.name == "adapter" else target
    config = run / "config.yaml"
    return load_recipe(config).model if config.is_file() else None


def family_of(model: ModelConfig) -> str:
    """The diffusion family whose pipeline a checkpoint names, for an adapter that does not say its own."""
    pipeline = read_component_config(local_checkpoint(model)).get("_class_name")
    known = {name: get_family(name).pipeline_names for name in DIFFUSION_FAMILIES}
    for name, pipelines in known.items():
        if pipeline in pipelines:
            return name
    names = sorted({one for pipelines in known.values() for one in pipelines})
    raise DitLoraError(
        f"{model.path} is a {pipeline} checkpoint; families have those of {', '.join(names)}"
    )
