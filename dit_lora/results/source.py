"""Finds a result, what it says of its making, and the base that it was trained on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

from dit_lora.adapters.diffusers_format import (
    ADAPTER_FILE,
    BASE_FILE,
    PROVENANCE_FILE,
    read_provenance,
)
from dit_lora.adapters.load import in_peft_format
from dit_lora.adapters.lora_file import STATE_FILE, WEIGHTS_FILE
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.config.records import Provenance, read_typed
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES, DIFFUSION_FAMILIES, get_family
from dit_lora.families.opening import local_checkpoint, read_component_config
from dit_lora.files import read_json

DIFFUSERS_FORMAT = (ADAPTER_FILE,)
ANY_FORMAT = (ADAPTER_FILE, SAFETENSORS_WEIGHTS_NAME)
"""Names of an adapter's file: Diffusers', or also that of a folder in PEFT's format."""


@dataclass(frozen=True)
class Source:
    """A diffusion adapter, or a whole pipeline."""

    target: Path
    """The path as the user gave it."""
    file: Path
    """The adapter's file; of a pipeline its folder."""
    made: Mapping[str, Any]
    """The provenance; empty if it is not ours."""
    is_pipeline: bool = False

    @property
    def part(self) -> str:
        """The component that the adapter is for, or that was trained of a pipeline."""
        return self.made.get("part", "transformer")

    def base(self, model: str | None) -> ModelConfig:
        """Return the base, with a family: `model`, that of the run it lies in, or the Hub id that it names.

        A pipeline is its own. Raises `DitLoraError` where nothing says it, and for a `model` of a pipeline.
        """
        if self.is_pipeline and model:
            raise DitLoraError(
                f"--model does not apply: {self.file} is a whole model, not an adapter"
            )
        recorded = None if self.is_pipeline else model_of_run(self.target, self.file)
        family = self.made.get("family") or (recorded.family if recorded else "")
        if model:
            base = ModelConfig(family=family, path=model)
        elif self.is_pipeline:
            base = ModelConfig(family=family, path=str(self.file))
        elif recorded is not None:
            base = recorded
        else:
            path = named_base(self.file, self.made.get("base_model") or peft_base(self.file.parent))
            base = ModelConfig(family=family, path=path, revision=self.made.get("revision"))
        if "part" in self.made:
            base = base.model_copy(update={"part": self.part})
        if "task" in self.made:
            base = base.model_copy(update={"task": self.made["task"]})
        return base if base.family else base.model_copy(update={"family": family_of(base)})


def find_source(
    target: Path,
    names: Sequence[str] = DIFFUSERS_FORMAT,
    read: Callable[[Path], Mapping[str, Any]] = read_provenance,
) -> Source:
    """Return the adapter or the pipeline of a run's folder, of its own folder, or of the adapter's file itself.

    `names` are those of an adapter's file, from which `read` takes the provenance. Raises `DitLoraError` where there
    is none.
    """
    whole = whole_pipeline(target)
    if whole is not None:
        record = whole / PROVENANCE_FILE
        return Source(target, whole, _provenance(record), True)
    file = _file_in(target, names) or _without_diffusers(target)
    if file is not None:
        return Source(target, file, read(file) or _made_of_checkpoint(file))
    in_peft_format = (path / CONFIG_NAME for path in (target, target / "adapter", target.parent))
    if names == DIFFUSERS_FORMAT and any(config.is_file() for config in in_peft_format):
        raise DitLoraError(
            f"{target} holds an adapter in PEFT's format: a chat model's answers by dit-lora chat; of a diffusion "
            f"model, write what its pipeline loads: dit-lora export {target} --to diffusers --out OUT"
        )
    raise DitLoraError(
        f"no adapter in {target}; give a run's folder, an adapter's folder or a .safetensors file"
    )


def _provenance(record: Path) -> dict[str, Any]:
    return dict(read_typed(record, Provenance)) if record.is_file() else {}


def whole_pipeline(target: Path) -> Path | None:
    """Return the pipeline's folder, of a run in mode `full` or the target itself; None if it is none."""
    folders = (path for path in (target, target / "model") if (path / "model_index.json").is_file())
    return next(folders, None)


def _file_in(target: Path, names: Sequence[str]) -> Path | None:
    """Return the file of one of these names in a run's or an adapter's folder, or the target if it is a file."""
    candidates = [target, *(folder / n for folder in (target, target / "adapter") for n in names)]
    return next((path for path in candidates if path.is_file()), None)


def _made_of_checkpoint(file: Path) -> dict[str, Any]:
    """Return the metadata of a run's result, for the file of one of its checkpoints; empty for any other file."""
    if file.name != WEIGHTS_FILE or not file.with_name(STATE_FILE).is_file():
        return {}
    saved = _file_in(file.absolute().parents[2], ANY_FORMAT)
    made = read_provenance(saved) if saved else {}
    # Its output is that of the last step.
    kept = {key: value for key, value in made.items() if key != "output"}
    return kept | ({"steps": int(file.parent.name.removeprefix("step_"))} if kept else {})


def _without_diffusers(target: Path) -> Path | None:
    """Return the file of a diffusion adapter of a kind that only PEFT reads; None where there is none."""
    file = _file_in(target, (SAFETENSORS_WEIGHTS_NAME,))
    if file is None or not in_peft_format(file):
        return None
    return file if read_provenance(file).get("family", "") in DIFFUSION_FAMILIES else None


def is_chat(target: Path, model: str | None) -> bool:
    """Return true if a target is of a chat model: by the run's recipe, the adapter's header, or PEFT's config."""
    if not target.exists() or whole_pipeline(target):
        return False
    file = _file_in(target, ANY_FORMAT) or _file_in(target, (BASE_FILE,))
    if file is None:
        base = model_of_run(target, None)
        return base.family in CHAT_FAMILIES if base else (target / "config.json").is_file()
    if file.name == ADAPTER_FILE:
        return False
    run = model_of_run(target, file)
    family = read_provenance(file).get("family") or (run.family if run else None)
    if family:
        return family in CHAT_FAMILIES
    # PEFT's format alone does not say: a diffusion adapter exported to it looks the same.
    on_pipeline = model is not None and (Path(model) / "model_index.json").is_file()
    own_class = peft_config(file).get("auto_mapping") or {}
    return not on_pipeline and not own_class.get("parent_library", "").startswith("diffusers.")


def model_of_run(target: Path, file: Path | None) -> ModelConfig | None:
    """Return the base by the recipe of the run that is the target, or that the adapter's file lies in."""
    run = target if target.is_dir() else target.parent
    # An adapter's file given by itself still lies in its run.
    if file and file.parent.name == "adapter":
        run = file.parent.parent
    if file and file.parent.parent.name == "checkpoints":
        run = file.parent.parent.parent
    config = run / "config.yaml"
    return load_recipe(config).model if config.is_file() else None


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
