"""Finds the adapters of a two-expert checkpoint: in a run of both experts, or in a folder with a file for each."""

from pathlib import Path

from dit_lora.adapters.diffusers_format import ADAPTER_FILE
from dit_lora.config.experts import EXPERT_NAMES, find_expert_runs
from dit_lora.errors import DitLoraError, format_list

EXPERT_FILE_PATTERNS = tuple(f"*_{name}.safetensors" for name in EXPERT_NAMES.values())
"""Glob patterns of the experts' file names."""


def format_expert_filename(expert: str) -> str:
    """File name of an expert's adapter in a folder with both. `expert` is high_noise or low_noise."""
    return f"{Path(ADAPTER_FILE).stem}_{expert}.safetensors"


def find_expert_results(target: Path) -> tuple[Path, ...]:
    """The paths of both experts' results (high noise first) or of the only one.

    Without experts, it is the path itself.

    A run of both experts contains a run for each. Elsewhere the file names end with `_high_noise` or `_low_noise`.

    Raises:
        DitLoraError: Several files in a folder have the same ending.
    """
    if not target.is_dir():
        return (target,)
    # A run of both experts: its subfolders high_noise and low_noise are complete runs.
    runs = find_expert_runs(target)
    if len(runs) > 1:
        return runs
    # An adapter's folder, or the folder of a run.
    for folder in (target, target / "adapter"):
        files = []
        for expert in EXPERT_NAMES.values():
            matches = sorted(folder.glob(f"*_{expert}.safetensors"))
            if len(matches) > 1:
                summary = f"{folder}: several files end with {expert}.safetensors; give one"
                raise DitLoraError(format_list(summary, list(map(str, matches))))
            files += matches
        if files:
            return tuple(files)
    return (target,)


def find_adapter_files(target: Path) -> list[Path]:
    """The adapter files at a path, of any experts; empty if there are none."""
    files = []
    for result in find_expert_results(target):
        # The result may be the file itself, an adapter's folder or a run's folder; take the first that exists.
        candidates = (result, result / ADAPTER_FILE, result / "adapter" / ADAPTER_FILE)
        files += [candidate for candidate in candidates if candidate.is_file()][:1]
    return files
