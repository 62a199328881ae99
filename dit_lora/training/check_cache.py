"""The cache of check results next to the data cache: its file, and what a result about the model depends on."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from dit_lora.environment.versions import probe_environment
from dit_lora.fuse.patches import get_fusion
from dit_lora.fuse.sources import compute_sources_digest
from dit_lora.training.task import AnySetup
from dit_lora.version import __version__

REMEASURE = "anew"
"""The value of guard.preflight that ignores cached results."""

REUSED = f"result of an earlier run; measured again with guard.preflight={REMEASURE}"
"""What the report says of a check whose cached result is used."""


def get_preflight_cache_path(setup: AnySetup) -> Path:
    """Path of the file with this rank's cached results of checks."""
    return setup.recipe.cache_dir / f"preflight_{setup.session.accelerator.process_index}.json"


def build_model_facts(setup: AnySetup) -> dict[str, Any]:
    """What a result about the model's layout depends on, as JSON values: versions, device, layout and settings."""
    recipe, accelerator, model = setup.recipe, setup.session.accelerator, setup.transformer
    environment = probe_environment()
    named_tensors = (*model.named_parameters(), *model.named_buffers())
    # Names, shapes and dtypes, not values: results are about a layout.
    layout = [(name, tuple(x.shape), str(x.dtype), x.requires_grad) for name, x in named_tensors]
    return {
        "version": __version__,
        "sources": compute_sources_digest(),
        "packages": dict(environment.versions),
        "python": environment.python,
        "cuda": environment.torch_cuda,
        "device": describe_device(accelerator.device),
        "ranks": (accelerator.num_processes, type(setup.engine).__name__),
        "transformer": setup.data.transformer_digest,
        "layout": hashlib.sha256(repr(layout).encode()).hexdigest(),
        "modules": sorted({str(type(module)) for module in model.modules()}),
        "dtype": str(setup.dtype),
        "kernels": recipe.kernels.model_dump(mode="json"),
        "lora": recipe.lora.model_dump(mode="json"),
        "quantize": recipe.model.quantize,
        "compile": str(recipe.train.compile),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    }


def describe_active_kernels(setup: AnySetup) -> list[Any] | None:
    """The kernels that the model uses at present, as JSON values; None if it is not fused."""
    fusion = get_fusion(setup.transformer)
    return None if fusion is None else [sorted(fusion.op_states.items()), fusion.stock, fusion.backend]


def describe_device(device: torch.device) -> dict[str, Any]:
    """Properties that identify a device (as JSON values), for the key of cached kernel comparisons."""
    if device.type != "cuda":
        return {"name": device.type, "capability": torch.backends.cpu.get_cpu_capability()}
    gpu = torch.cuda.get_device_properties(device)
    # A kernel may be wrong on a single GPU, so identify the GPU, not its model.
    return {"name": gpu.name, "capability": (gpu.major, gpu.minor), "uuid": str(gpu.uuid)}
