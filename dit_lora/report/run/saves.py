"""Lists the adapters that a run's saves left: eval loss and samples of each step, and the line that loads it."""

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dit_lora.adapters.marked_save import read_best_marked_step
from dit_lora.families import CHAT_FAMILIES
from dit_lora.files import can_open_inside_folder
from dit_lora.report.run.files import RunFiles
from dit_lora.report.run.history import ensure_dict

ADAPTER_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
MAX_SAMPLES = 4
"""Maximum number of samples that a step links to."""


@dataclass(frozen=True)
class SavedAdapter:
    """The adapter of one saved step."""

    step: int
    eval_loss: float | None
    """None if it was not measured at this step."""
    samples: Sequence[str]
    """Paths of the step's samples, relative to the run's folder."""
    can_resume: bool
    """True if the folder also has the state, from which training can continue."""
    is_marked: bool
    """True if a user has marked it as best."""
    load_line: str
    """Python, or a command, that loads the adapter, from the folder that the run's folder is in."""


def list_saved_adapters(run: RunFiles) -> list[SavedAdapter]:
    """The adapters in a run's checkpoints, in the order of steps. Checkpoints of earlier versions have none."""
    adapters = []
    marked_step = read_best_marked_step(run.folder)
    folders = list_step_folders(run.folder / "checkpoints")
    for step, file in [(step, folder / name) for step, folder in folders.items() for name in ADAPTER_FILES]:
        if not can_open_inside_folder(run.folder, file):
            continue
        # The samples that the run made at this step.
        samples = sorted((run.folder / "samples" / file.parent.name).glob("prompt_*.*"))
        # Not every save has a validation.
        loss = run.eval_losses.get(step, math.nan)
        adapters.append(
            SavedAdapter(
                step=step,
                eval_loss=loss if math.isfinite(loss) else None,
                samples=[
                    path.relative_to(run.folder).as_posix()
                    for path in samples
                    # Names come from the file system, so only those that a run writes become links.
                    if re.fullmatch(r"prompt_\d{1,6}\.(mp4|png)", path.name)
                    and can_open_inside_folder(run.folder, path)
                ][:MAX_SAMPLES],
                # The manifest is written last, so it shows that the state is complete.
                can_resume=(file.parent / "manifest.json").is_file(),
                is_marked=step == marked_step,
                load_line=_format_load_line(run, file),
            )
        )
    return adapters


def list_step_folders(folder: Path) -> dict[int, Path]:
    """The folders named by their step, such as `step_000020`, directly in a folder, in the order of steps."""
    folders = {}
    for path in folder.glob("step_*"):
        # At least six digits, padded with zeros; a temporary folder has another name.
        match = re.fullmatch(r"step_(\d{6,12})", path.name)
        # A link could lead to another run.
        if match and path.is_dir() and not path.is_symlink():
            folders[int(match[1])] = path
    return dict(sorted(folders.items()))


def _format_load_line(run: RunFiles, file: Path) -> str:
    """The line for the stock pipeline or model, or for `dit-lora` where these cannot load the files."""
    model, lora = ensure_dict(run.config.get("model")), ensure_dict(run.config.get("lora"))
    folder = f"{run.name}/checkpoints/{file.parent.name}"
    path = json.dumps(folder, ensure_ascii=False)
    has_base_weights = file.with_name("base_weights.safetensors").exists()
    if model.get("family") in CHAT_FAMILIES:
        # PEFT does not read the second file; the command does.
        command = f"dit-lora chat {shlex.quote(folder)} --prompt '...'"
        return command if has_base_weights else f"model = PeftModel.from_pretrained(model, {path})"
    pipeline = ensure_dict(run.facts.get("pipeline"))
    # Recorded in runs of diffusion models.
    has_loader = pipeline.get("loads_lora") is not False and pipeline.get("module", "diffusers") == "diffusers"
    is_plain = file.name == ADAPTER_FILES[0] and lora.get("kind") != "lokr" and not has_base_weights
    if not (has_loader and is_plain):
        return f"dit_lora.load_adapter(pipe, {path})"
    arguments = ", load_into_transformer_2=True" if model.get("part") == "transformer_2" else ""
    return f"pipe.load_lora_weights({path}{arguments})"
