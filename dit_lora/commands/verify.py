"""Finds the target of `dit-lora verify`: the file, the kind of model, and the base checkpoint. Then verifies it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE, read_run_metadata
from dit_lora.adapters.load import is_in_peft_format
from dit_lora.adapters.peft_format import CHAT_ADAPTER_FILE, find_chat_adapter_file
from dit_lora.adapters.quantize import quantize_base
from dit_lora.config.recipe import ModelConfig
from dit_lora.config.remedies import HUB_PREFIX
from dit_lora.environment.progress_bar import hide_progress_bars
from dit_lora.environment.safetensors_files import read_header, read_tensors
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES, DIFFUSION_FAMILIES, get_family
from dit_lora.families.chat_base import ChatCheckpoint, VisionSettings
from dit_lora.numerics.precision import choose_precision
from dit_lora.training.tasks.chat.answerer import find_origin
from dit_lora.verify.chat_model import ChatReferenceModel
from dit_lora.verify.diffusion_model import DiffusionReferenceModel
from dit_lora.verify.locate import find_pipeline_folder, find_result_source
from dit_lora.verify.pipeline_checks import check_pipeline_files
from dit_lora.verify.reference_model import ReferenceModel
from dit_lora.verify.verified_files import (
    VERIFICATION_FILE,
    compute_digests,
    find_changed_files,
    list_result_files,
    read_verification,
    write_verification,
)
from dit_lora.verify.verify import (
    Verification,
    VerificationTarget,
    check_adapter,
    check_pipeline,
    raise_check_failed_if_unreadable,
)

TargetKind = Literal["diffusion", "chat", "pipeline"]


@dataclass(frozen=True)
class VerifyTarget:
    """A result to verify, with its kind and its base checkpoint."""

    kind: TargetKind
    file: Path
    """The adapter's file (or its base weights', if there is no adapter); for a pipeline its folder."""
    model: ModelConfig
    """The base checkpoint; for a pipeline, the pipeline itself."""
    metadata: Mapping[str, Any]
    """The training metadata in the file's header; empty if the file is not ours."""

    @property
    def result_location(self) -> tuple[Path, str]:
        """The folder of the result and, for a pipeline, the name of the trained component; else an empty name."""
        if self.kind == "pipeline":
            return self.file, self.metadata.get("part", "transformer")
        return self.file.parent, ""

    @property
    def base_name(self) -> str:
        """Name of the base checkpoint without folders, safe to publish."""
        # A local path is shown as the folder's name only.
        path = Path(self.model.path).expanduser()
        return path.resolve().name if path.is_dir() else self.model.path.removeprefix(HUB_PREFIX)

    def open_reference_model(self) -> ReferenceModel:
        """Open the base checkpoint.

        Raises `DitLoraError` if it does not exist, or is of another family than the adapter.
        """
        family = get_family(self.model.family)
        if self.model.family in CHAT_FAMILIES:
            viewing = self.metadata.get("viewing")
            chat: ChatCheckpoint = family.open(self.model)
            return ChatReferenceModel(chat.copy_with_vision_settings(VisionSettings(**viewing)) if viewing else chat)
        # Training may have added classes to the model's index.
        index = self.metadata.get("index") if self.kind == "diffusion" else None
        return DiffusionReferenceModel(family.open(self.model, index=index).copy_with_training_metadata(self.metadata))


def find_target(target: Path, model: str | None) -> VerifyTarget:
    """Find what to verify at this path: a run's folder, an adapter's folder or file, or a pipeline's folder.

    Args:
        target: The path.
        model: The base checkpoint to use instead of the recorded one.

    Raises:
        DitLoraError: It is none of these, its file cannot be read, or its base is not recorded.
    """
    if not target.exists():
        raise DitLoraError(f"{target} does not exist; give a run's folder, or an adapter's folder or file")
    # Look for a chat adapter first: `find_result_source` raises for a folder in PEFT's format.
    chat = None if find_pipeline_folder(target) else _find_chat_folder(target)
    if chat is not None:
        peft_file = chat / CHAT_ADAPTER_FILE
        # Some kinds of adapters for diffusion models are saved in PEFT's format, too.
        if not (is_in_peft_format(peft_file) and read_run_metadata(peft_file).get("family") in DIFFUSION_FAMILIES):
            return _make_chat_target(chat, model)
    source = find_result_source(target)
    base = source.resolve_base(model)
    if source.is_pipeline:
        # Read the headers now, so that the error names the corrupt file; the loader's error would not.
        for weights in sorted((source.file / source.part).glob("*.safetensors")):
            read_header(weights)
    return VerifyTarget("pipeline" if source.is_pipeline else "diffusion", source.file, base, source.metadata)


def _find_chat_folder(target: Path) -> Path | None:
    """The folder of a chat adapter at this path, or of a diffusion adapter in PEFT's format; None if there is none."""
    if target.is_file():
        # A file stands for the folder that it is in.
        is_adapter = target.name in (CHAT_ADAPTER_FILE, BASE_FILE)
        return _find_chat_folder(target.parent) if is_adapter else None
    # A run keeps its adapter in the subfolder `adapter`.
    for folder in (target, target / "adapter"):
        # Stage 2 of VideoChat2 trains only base weights. With a LoRA file they belong to a diffusion adapter.
        has_only_base_weights = (folder / BASE_FILE).is_file() and not (folder / ADAPTER_FILE).is_file()
        if (folder / "adapter_config.json").is_file() or has_only_base_weights:
            return folder
    return None


def _make_chat_target(folder: Path, model: str | None) -> VerifyTarget:
    file = find_chat_adapter_file(folder)
    metadata = read_run_metadata(file)
    if metadata.get("family") in DIFFUSION_FAMILIES:
        raise DitLoraError(
            f"{folder} is a diffusion adapter in PEFT's format; verify reads what pipelines load: "
            f"dit-lora export {folder} --to diffusers --out OUT, then dit-lora verify OUT"
        )
    return VerifyTarget("chat", file, find_origin(folder, model).model, metadata)


@raise_check_failed_if_unreadable()
def verify_adapter(target: Path, model: str | None = None, *, allow_extreme_update: bool = False) -> Verification:
    """Verify a run's result, an adapter's folder or file, or a pipeline's folder, on its base checkpoint.

    Args:
        target: The path.
        model: The base checkpoint to use instead of the run's.
        allow_extreme_update: Report an extremely large update as a note instead of a failure.

    Raises:
        DitLoraError: There is nothing to verify, or no base.
        CheckFailedError: A file cannot be read.
    """
    hide_progress_bars()
    source = find_target(target, model)
    run = source.file.parent if source.kind == "pipeline" else source.file.parent.parent
    # Only a run's folder, verified on the run's base, has a verification record to update.
    is_own = target.is_dir() and run.resolve() == target.resolve() and model is None
    if not (is_own and (run / "config.yaml").is_file()):
        return _run_checks(source, allow_extreme_update)
    # Before the checks: they must be about the same bytes.
    digests = compute_digests(run, list_result_files(*source.result_location))
    changed = find_changed_files(run)
    checked = replace(_run_checks(source, allow_extreme_update), files=digests)
    return _update_verification_file(run, checked, changed) if checked.passed else checked


def _update_verification_file(run: Path, verification: Verification, changed: Sequence[str]) -> Verification:
    """Write the run's verification.json if it is missing, or if it was written for other adapter files."""
    path = run / VERIFICATION_FILE
    stored = read_verification(run)
    # The record is up to date.
    if stored.get("files") == verification.files and stored.get("passed") is True:
        return verification
    try:
        write_verification(run, verification.to_dict())
    # The result is verified all the same, for example on a read-only disk.
    except OSError as error:
        return replace(verification, notes=(f"cannot write {path}: {error.strerror}",))
    change = f"{', '.join(changed)} changed since the run verified it; " if changed else ""
    return replace(verification, notes=(f"{change}{VERIFICATION_FILE} is written again",))


def _run_checks(source: VerifyTarget, allow_extreme_update: bool) -> Verification:
    reference_model = source.open_reference_model()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = choose_precision("auto", device).dtype
    result = VerificationTarget(
        source.file, source.metadata, source.base_name, reference_model, dtype, allow_extreme=allow_extreme_update
    )
    if source.kind == "pipeline":
        # Names and shapes only: the model is on the meta device.
        expected = reference_model.load_meta_model(dtype).state_dict()
        checks = check_pipeline_files(reference_model.list_weight_files(), expected, reference_model.name)
        return check_pipeline(result, checks, lambda: reference_model.load_model(dtype).to(device))
    # A base that no adapter was loaded into.
    base_model = reference_model.load_model(dtype)
    if source.metadata.get("quantize"):  # as it was trained on
        quantize_base(base_model, source.metadata["quantize"], set(read_tensors(result.base_file, missing_ok=True)))
    return check_adapter(result, base_model.to(device))
