"""Runs of which what is saved counts, copies of it with a fault, and what `dit-lora verify` finds in them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from launching import ROOT
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dit_lora.adapters.diffusers_format import ADAPTER_FILE
from dit_lora.verify.verify import Verification

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, str]], Tensors | None]
SMOKES = ROOT / "recipes" / "smoke"


def quick(clips: Path, out: Path, *more: str) -> list[str]:
    """Overrides of a smoke recipe of a diffusion model: what is saved counts, not what it looks like."""
    return [
        f"data.path={clips}",
        f"data.cache={out / 'cache'}",
        f"run.dir={out / 'run'}",
        "data.height=32",
        "data.width=48",
        "train.steps=3",
        "train.batch_size=1",
        "validation.prompts=[]",
        "validation.eval_draws=0",
        "guard.preflight=false",
        *more,
    ]


def changed(adapter: Path, out: Path, change: Change, file: str = ADAPTER_FILE) -> Path:
    """A copy of an adapter's folder with one file's tensors and header changed in place, or the tensors returned."""
    shutil.copytree(adapter, out)
    with safe_open(out / file, framework="pt") as opened_file:
        header = dict(opened_file.metadata())
    tensors = load_file(out / file)
    tensors = change(tensors, header) or tensors
    save_file(tensors, out / file, metadata=header)
    return out


def failing(found: Verification) -> set[str]:
    return {name for name, check in found.checks.items() if not check.passed}
