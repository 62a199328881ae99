"""Finds the adapters of a checkpoint's two experts, in a run of both or in a folder with a file of each."""

from pathlib import Path

from dit_lora.adapters.diffusers_format import ADAPTER_FILE
from dit_lora.config.experts import EXPERTS
from dit_lora.errors import DitLoraError, listed

PAIR_PATTERNS = tuple(f"*_{name}.safetensors" for name in EXPERTS.values())
"""Patterns of the names that experts' files have."""


def pair_file(name: str) -> str:
    """Return the name of an expert's adapter beside the other's, `name` being high_noise or low_noise."""
    return f"{Path(ADAPTER_FILE).stem}_{name}.safetensors"


def targets_of(target: Path) -> tuple[Path, ...]:
    """Return the results of both experts where a target has them, high noise first, or one expert's; else the target.

    A run of both has a run of each inside; elsewhere files are told by how their names end, `_high_noise` or
    `_low_noise`. Raises `DitLoraError` where several end alike.
    """
    if not target.is_dir():
        return (target,)
    runs = runs_of(target)
    if len(runs) > 1:
        return runs
    for folder in (target, target / "adapter"):
        files = tuple(file for name in EXPERTS.values() for file in _ending(folder, name))
        if files:
            return files
    return (target,)


def runs_of(folder: Path) -> tuple[Path, ...]:
    """Return the runs of both experts in the folder of a run of both, high noise first; else the folder."""
    runs = tuple(folder / name for name in EXPERTS.values())
    return runs if all((run / "config.yaml").is_file() for run in runs) else (folder,)


def files_of_experts(target: Path) -> list[Path]:
    """Return the files of the adapters at a target, whichever experts they are of; empty where there are none."""
    found = []
    for one in targets_of(target):
        places = (one, one / ADAPTER_FILE, one / "adapter" / ADAPTER_FILE)
        found += [place for place in places if place.is_file()][:1]
    return found


def _ending(folder: Path, name: str) -> list[Path]:
    files = sorted(folder.glob(f"*_{name}.safetensors"))
    if len(files) > 1:
        raise DitLoraError(
            listed(
                f"{folder}: several files end with {name}.safetensors; give one",
                list(map(str, files)),
            )
        )
    return files
