"""Lists the adapters that a run's saves left: eval loss and samples of each step, and the line that loads it."""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dit_lora.families import CHAT_FAMILIES
from dit_lora.files import can_open_inside
from dit_lora.report.run.files import RunFiles
from dit_lora.report.run.history import ensure_dict

_ADAPTER_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
MAX_SAMPLES = 4
"""Maximum number of samples that a step links to."""


@dataclass(frozen=True)
class SavedAdapter:
    """The adapter of one saved step."""

    step: int
    eval_loss: float | None
    """None if it was not measured at this step."""
    has_lowest_loss: bool
    samples: Sequence[str]
    """Paths of the step's samples, relative to the run's folder."""
    can_resume: bool
    """True if the folder also has the state, from which training can continue."""
    load_line: str
    """Python, or a command, that loads the adapter, from the folder that the run's folder is in."""


def list_saved_adapters(run: RunFiles) -> list[SavedAdapter]:
    """The adapters in a run's checkpoints, in the order of steps. Checkpoints of earlier versions have none."""
    files = _find_adapter_files(run.folder)
    losses = {step: run.eval_losses[step] for step in files if math.isfinite(run.eval_losses.get(step, math.nan))}
    # With a single loss there is nothing to compare.
    lowest = min(losses.values()) if len(losses) > 1 else None
    return [
        SavedAdapter(
            step=step,
            eval_loss=losses.get(step),
            has_lowest_loss=lowest is not None and losses.get(step) == lowest,
            samples=_find_sample_paths(run.folder, file.parent.name),
            can_resume=(file.parent / "manifest.json").is_file(),
            load_line=_format_load_line(run, file),
        )
        for step, file in files.items()
    ]


def _find_adapter_files(folder: Path) -> dict[int, Path]:
    """The adapter's file of each saved step, ascending."""
    files = {}
    for path in (folder / "checkpoints").glob("step_*"):
        # At least six digits, padded with zeros; a temporary folder has another name.
        match = re.fullmatch(r"step_(\d{6,12})", path.name)
        names = [name for name in _ADAPTER_FILES if match and can_open_inside(folder, path / name)]
        if match and names:
            files[int(match[1])] = path / names[0]
    return dict(sorted(files.items()))


def _find_sample_paths(folder: Path, step_name: str) -> list[str]:
    paths = sorted((folder / "samples" / step_name).glob("prompt_*.*"))
    # Names come from the file system, so only those that a run writes become links.
    own = [path for path in paths if re.fullmatch(r"prompt_\d{1,6}\.(mp4|png)", path.name)]
    return [path.relative_to(folder).as_posix() for path in own if can_open_inside(folder, path)][:MAX_SAMPLES]


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
    is_stock = file.name == _ADAPTER_FILES[0] and lora.get("kind") != "lokr" and _loads_lora(run.facts)
    if not is_stock or has_base_weights:
        return f"dit_lora.load_adapter(pipe, {path})"
    second = ", load_into_transformer_2=True" if model.get("part") == "transformer_2" else ""
    return f"pipe.load_lora_weights({path}{second})"


def _loads_lora(facts: Mapping[str, Any]) -> bool:
    """False if the stock pipeline has no LoRA loader, by the record of the run."""
    pipeline = ensure_dict(facts.get("pipeline"))
    return pipeline.get("loads_lora") is not False and pipeline.get("module", "diffusers") == "diffusers"
