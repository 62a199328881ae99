"""Caches, next to the data cache, which kernels were compared with the unpatched model and found right."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dit_lora.environment.versions import probe_environment
from dit_lora.fuse.sources import compute_sources_digest
from dit_lora.guard.checks import CheckFinding, is_cached, store_findings
from dit_lora.guard.comparison.block_parity import MIN_PASSES
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.ranks import is_true_on_all_ranks
from dit_lora.training.recovery.kernel_parity import ParityWatch
from dit_lora.training.recovery.run_recovery import RunRecovery
from dit_lora.training.task import AnySetup
from dit_lora.version import __version__

REMEASURE = "anew"
"""The value of guard.preflight that ignores cached results."""


def get_preflight_cache_path(setup: AnySetup) -> Path:
    """Path of the file with this rank's cached results of kernel comparisons."""
    return setup.recipe.cache_dir / f"preflight_{setup.session.accelerator.process_index}.json"


class ParityCache:
    """The cached result of an earlier run's comparison of the same kernels, on the same model and batches.

    It counts only if every rank has it.
    """

    def __init__(
        self,
        setup: AnySetup,
        recovery: RunRecovery,
        parity_watch: ParityWatch,
        batches: Sequence[MicroBatch],
        num_passes: int,
    ) -> None:
        self.file = get_preflight_cache_path(setup)
        key = _build_cache_key(setup, parity_watch, batches)
        self._cache_key = {**key, "passes": num_passes}
        # If weights have trained since the last comparison, their values were never compared.
        weights_compared = parity_watch.start_step in (0, recovery.state.passed)
        is_known = weights_compared and setup.recipe.guard.preflight != REMEASURE
        # Without switches there is nothing to compare, and nothing to look up.
        is_remembered = bool(parity_watch.fallbacks) and is_known
        # A full comparison also stands for the shorter one of a short run.
        is_remembered &= is_cached(self.file, self._cache_key) or is_cached(self.file, {**key, "passes": MIN_PASSES})
        # One rank without a cached result makes all ranks compare, because comparing is collective.
        self.has_passed_before: bool = is_true_on_all_ranks(is_remembered)
        """True if every rank has made the same comparison before, and found no difference."""

    def store(self, *, is_sound: bool) -> None:
        """Cache a kernel comparison if no rank found a difference, and nothing was left uncompared."""
        if is_true_on_all_ranks(is_sound):
            message = "no kernel differs from the stock model"
            store_findings(self.file, self._cache_key, [CheckFinding("kernels", True, message, fatal=False)])


def _build_cache_key(setup: AnySetup, parity_watch: ParityWatch, batches: Sequence[MicroBatch]) -> dict[str, Any]:
    recipe, accelerator, model = setup.recipe, setup.session.accelerator, setup.transformer
    environment = probe_environment()
    named_tensors = (*model.named_parameters(), *model.named_buffers())
    # Names, shapes and dtypes, not values: kernels are compared for a layout.
    layout = [(name, tuple(x.shape), str(x.dtype), x.requires_grad) for name, x in named_tensors]
    return {
        "what": "kernels",
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
        "shapes": [{n: list(x.shape) for n, x in micro_batch.tensors.items()} for micro_batch in batches],
        "switches": sorted(switch.name for switch in parity_watch.fallbacks),
        "places": sorted(parity_watch.replaced_ops),
        "kernels": recipe.kernels.model_dump(mode="json"),
        "lora": recipe.lora.model_dump(mode="json"),
        "quantize": recipe.model.quantize,
        "compile": str(recipe.train.compile),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    """Properties that identify a device (as JSON values), for the key of cached kernel comparisons."""
    if device.type != "cuda":
        return {"name": device.type, "capability": torch.backends.cpu.get_cpu_capability()}
    gpu = torch.cuda.get_device_properties(device)
    # A kernel may be wrong on a single GPU, so identify the GPU, not its model.
    return {"name": gpu.name, "capability": (gpu.major, gpu.minor), "uuid": str(gpu.uuid)}
