"""Finds a result, its training metadata, and the base checkpoint that it was trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE, RUN_METADATA_FILE, read_run_metadata
from dit_lora.adapters.load import is_in_peft_format
from dit_lora.adapters.lora_file import STATE_FILE, WEIGHTS_FILE
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.config.records import RunMetadata, read_typed_json
from dit_lora.environment.pipeline_index import find_index_file
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES, DIFFUSION_FAMILIES, get_diffusion_families
from dit_lora.families.opening import get_checkpoint_folder, read_component_config
from dit_lora.files import read_json

DIFFUSERS_FILENAMES = (ADAPTER_FILE,)
ADAPTER_FILENAMES = (ADAPTER_FILE, SAFETENSORS_WEIGHTS_NAME)
"""File names of an adapter: in Diffusers' format only, or also in PEFT's format."""


@dataclass(frozen=True)
class TrainedResultLocation:
    """A diffusion adapter or a full pipeline that was found at a path."""

    target: Path
    """The path as the user gave it."""
    file: Path
    """The adapter's file, or the pipeline's folder."""
    metadata: Mapping[str, Any]
    """The training metadata; empty if the file is not ours."""
    is_pipeline: bool = False

    @property
    def part(self) -> str:
        """Name of the pipeline component that was trained, such as `transformer`: the one that the adapter is for."""
        return self.metadata.get("part", "transformer")

    def resolve_base(self, model: str | None) -> ModelConfig:
        """The base checkpoint, with its family.

        It is `model`, else the one in the config of the run that the adapter is in, else the recorded Hub id. A
        pipeline is its own base.

        Raises:
            DitLoraError: The base is not recorded, or `model` is given for a pipeline.
        """
        if self.is_pipeline and model:
            raise DitLoraError(f"--model does not apply: {self.file} is a whole model, not an adapter")
        # Order of precedence: --model, the pipeline itself, the run's recipe, the adapter's header.
        recorded = None if self.is_pipeline else read_run_model(self.target, self.file)
        family = self.metadata.get("family") or (recorded.family if recorded else "")
        if model:
            base = ModelConfig(family=family, path=model)
        elif self.is_pipeline:
            base = ModelConfig(family=family, path=str(self.file))
        elif recorded is not None:
            base = recorded
        else:
            path = require_hub_base(self.file, self.metadata.get("base_model") or read_peft_base(self.file.parent))
            base = ModelConfig(family=family, path=path, revision=self.metadata.get("revision"))
        # The header knows which expert and task were trained; a base given by path does not.
        if "part" in self.metadata:
            base = base.model_copy(update={"part": self.part})
        if "task" in self.metadata:
            base = base.model_copy(update={"task": self.metadata["task"]})
        return base if base.family else base.model_copy(update={"family": detect_family(base)})


def find_result_source(target: Path, filenames: Sequence[str] = DIFFUSERS_FILENAMES) -> TrainedResultLocation:
    """Find the adapter or the pipeline at this path. It is a run's folder, an adapter's folder, or an adapter's file.

    Args:
        target: The path.
        filenames: Accepted file names of an adapter.

    Raises:
        DitLoraError: There is none.
    """
    # A full pipeline comes first, then an adapter's file with one of the accepted names.
    pipeline = find_pipeline_folder(target)
    if pipeline is not None:
        record = pipeline / RUN_METADATA_FILE
        metadata = dict(read_typed_json(record, RunMetadata)) if record.is_file() else {}
        return TrainedResultLocation(target, pipeline, metadata, is_pipeline=True)
    file = _find_result_file(target, filenames)
    if file is None:
        # Some kinds of adapters of diffusion models are stored in PEFT's format only.
        peft_file = _find_result_file(target, (SAFETENSORS_WEIGHTS_NAME,))
        if peft_file is not None and is_in_peft_format(peft_file):
            is_diffusion = read_run_metadata(peft_file).get("family", "") in DIFFUSION_FAMILIES
            file = peft_file if is_diffusion else None
    if file is not None:
        return TrainedResultLocation(target, file, read_run_metadata(file) or _read_checkpoint_metadata(file))
    peft_configs = (path / CONFIG_NAME for path in (target, target / "adapter", target.parent))
    if filenames == DIFFUSERS_FILENAMES and any(config.is_file() for config in peft_configs):
        raise DitLoraError(
            f"{target} has an adapter in PEFT's format; for a chat model, use dit-lora chat; for a diffusion "
            f"model, convert it first: dit-lora export {target} --to diffusers --out OUT"
        )
    raise DitLoraError(f"no adapter in {target}; give a run's folder, an adapter's folder or a .safetensors file")


def find_pipeline_folder(target: Path) -> Path | None:
    """Folder of the pipeline at a path: the path itself, or the result of a run in mode `full`.

    None if there is none.
    """
    folders = (path for path in (target, target / "model") if find_index_file(path))
    return next(folders, None)


def _find_result_file(target: Path, filenames: Sequence[str]) -> Path | None:
    """The first file with one of these names in a run's or adapter's folder, or the target if it is a file."""
    candidates = [target, *(folder / n for folder in (target, target / "adapter") for n in filenames)]
    return next((path for path in candidates if path.is_file()), None)


def _read_checkpoint_metadata(file: Path) -> dict[str, Any]:
    """Training metadata for the adapter file of a run's checkpoint, from the run's result; empty for other files."""
    if file.name != WEIGHTS_FILE or not file.with_name(STATE_FILE).is_file():
        return {}
    # RUN/checkpoints/step_N/file: the run's folder is two levels above the file's.
    saved = _find_result_file(file.absolute().parents[2], ADAPTER_FILENAMES)
    metadata = read_run_metadata(saved) if saved else {}
    # Drop the recorded output: it belongs to the last step.
    applicable = {key: value for key, value in metadata.items() if key != "output"}
    return applicable | ({"steps": int(file.parent.name.removeprefix("step_"))} if applicable else {})


def is_chat_result(target: Path, model: str | None) -> bool:
    """True if the result at a path is a chat model's, by the run's recipe, the adapter's header, or PEFT's config."""
    # Not a local path, or a diffusion pipeline.
    if not target.exists() or find_pipeline_folder(target):
        return False
    # Base weights without an adapter are a result too.
    file = _find_result_file(target, ADAPTER_FILENAMES) or _find_result_file(target, (BASE_FILE,))
    if file is None:
        base = read_run_model(target, None)
        return base.family in CHAT_FAMILIES if base else (target / "config.json").is_file()
    # Only diffusion adapters have Diffusers' file name.
    if file.name == ADAPTER_FILE:
        return False
    # The header decides; adapters of others have none, so the run's recipe comes second.
    run = read_run_model(target, file)
    family = read_run_metadata(file).get("family") or (run.family if run else None)
    if family:
        return family in CHAT_FAMILIES
    # PEFT's format is not enough to tell: a diffusion adapter exported to it looks the same.
    on_pipeline = model is not None and find_index_file(Path(model)) is not None
    auto_mapping = read_adapter_config(file).get("auto_mapping") or {}
    return not on_pipeline and not auto_mapping.get("parent_library", "").startswith("diffusers.")


def read_run_model(target: Path, file: Path | None) -> ModelConfig | None:
    """The base checkpoint in the config.yaml of the run at this path, or around the adapter's file.

    None without a run.
    """
    run = target if target.is_dir() else target.parent
    # The path may be of an adapter's file inside a run.
    if file and file.parent.name == "adapter":
        run = file.parent.parent
    if file and file.parent.parent.name == "checkpoints":
        run = file.parent.parent.parent
    config = run / "config.yaml"
    return load_recipe(config).model if config.is_file() else None


def require_hub_base(target: Path, base_name: str) -> str:
    """The Hub id of the base recorded in a result. Raises `DitLoraError` if it is only the name of a local folder."""
    # A Hub id has an owner; a name without one is a local folder.
    if "/" in base_name:
        return base_name
    hint = f" (trained on {base_name})" if base_name else ""
    raise DitLoraError(f"{target} does not name its base model{hint}; give --model")


def read_peft_base(folder: Path) -> str:
    """The base checkpoint named in the config of an adapter's folder in PEFT's format; empty if there is none."""
    return read_adapter_config(folder / CONFIG_NAME).get("base_model_name_or_path") or ""


def read_adapter_config(file: Path) -> dict[str, Any]:
    """Content of the adapter_config.json next to a file in PEFT's format; empty if there is none."""
    config = file.with_name(CONFIG_NAME)
    return read_json(config) if config.is_file() else {}


def detect_family(model: ModelConfig) -> str:
    """The diffusion family of a checkpoint, found by its pipeline class. For adapters that do not record their family.

    Raises:
        DitLoraError: No family has this pipeline class.
    """
    # `_class_name` of model_index.json.
    pipeline = read_component_config(get_checkpoint_folder(model)).get("_class_name")
    families = {name: family.pipeline_names for name, family in get_diffusion_families().items()}
    for name, pipelines in families.items():
        if pipeline in pipelines:
            return name
    names = sorted({pipeline_name for pipelines in families.values() for pipeline_name in pipelines})
    raise DitLoraError(f"{model.path} is a {pipeline} checkpoint; families have those of {', '.join(names)}")
