"""What a run left in its folder and in its cache."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.faults.media.cache import overwrite
from dit_lora.data.cache.cache import TensorCache
from dit_lora.data.cache.shards import StoredEntry
from dit_lora.training import finish

MAX_STEP_LINES = 6
"""Lines about steps in a normal run's log: five eval losses and a save."""


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "pytorch_lora_weights.safetensors")


def same_adapter(one: Path, other: Path) -> bool:
    first_adapter, second = adapter(one), adapter(other)
    return first_adapter.keys() == second.keys() and all(
        torch.equal(first_adapter[n], second[n]) for n in first_adapter
    )


def trajectory(run: Path) -> list[tuple[float, ...]]:
    return [(m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in lines(run, "metrics.jsonl")]


def require_short_log(log: str, run: Path) -> list[str]:
    """The lines of a normal run's log: at most 15, with at most 80 columns.

    Kernels that the recipe asks for by name have lines of their own, and a line that is wrapped counts once.
    """
    log_lines = log.replace(str(run), "runs/demo").splitlines()
    without_kernels = re.sub(r"^kernels: .*\n(  \S.*\n)*", "", log, flags=re.MULTILINE)
    other_lines = re.sub(r"\n  (?=\S)", " ", without_kernels).splitlines()
    # The process of the tests is older than a minute, so that a start in it counts as slow.
    num_other_lines = sum(not line.startswith(("step ", "first step after ")) for line in other_lines)
    assert num_other_lines + MAX_STEP_LINES <= 15, log
    assert max(map(len, log_lines)) <= 80, log
    return log_lines


def poison(cache: Path, sample: str) -> StoredEntry:
    """Put one NaN into a clip's cached latent, with the digest in the header left as it was."""
    for entry in TensorCache(cache / "videos").iter_entries():
        if entry.sample == sample and "mirrored" not in entry.facts:
            overwrite(entry, "latent_mean", 7, torch.tensor([torch.nan]))
            return entry
    raise AssertionError(f"no entry of {sample}")


def without_verification(patches: pytest.MonkeyPatch) -> None:
    """A run does not load its adapter again when it ends."""
    patches.setattr(finish, "_try_verification", lambda *_: None)
