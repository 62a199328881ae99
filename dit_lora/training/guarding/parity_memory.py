"""Remembers, beside the cache, which kernels were compared with the stock model and found right."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from dit_lora.environment.versions import probe_environment
from dit_lora.fuse.sources import sources_digest
from dit_lora.guard.checks import CheckFinding, is_cached, remember
from dit_lora.guard.comparison.block_parity import PASSES
from dit_lora.guard.replay import MicroBatch
from dit_lora.training.guarding.parity_watch import ParityWatch
from dit_lora.training.guarding.recovery import RunRecovery
from dit_lora.training.task import AnySetup
from dit_lora.version import __version__

ANEW = "anew"
"""The value of guard.preflight that takes nothing from memory."""


def memory_file(setup: AnySetup) -> Path:
    """Return the file in which this rank's results are remembered."""
    return setup.recipe.cache_dir / f"preflight_{setup.session.accelerator.process_index}.json"


class ParityMemory:
    """The inputs of a comparison of kernels, and its result if the same comparison was made before. Collective."""

    def __init__(
        self,
        setup: AnySetup,
        recovery: RunRecovery,
        parity: ParityWatch,
        batches: Sequence[MicroBatch],
    ) -> None:
        self.file = memory_file(setup)
        self._facts = _facts(setup, parity, batches)
        # Weights that have trained since the last comparison were seen by none.
        seen = parity.start_step in (0, recovery.state.passed)
        is_known = seen and setup.recipe.guard.preflight != ANEW
        own = bool(parity.switches) and is_known and is_cached(self.file, self._facts)
        self.knows: bool = all(gather_object([own]))
        """True if every rank has compared the same before, and found it right."""

    def keep(self, *, sound: bool) -> None:
        """Remember a comparison in which nothing differed on any rank, and nothing was missed."""
        if all(gather_object([sound])):
            words = "no kernel differs from the stock model"
            remember(self.file, self._facts, [CheckFinding("kernels", True, words, fatal=False)])


def _facts(setup: AnySetup, parity: ParityWatch, batches: Sequence[MicroBatch]) -> dict[str, Any]:
    recipe, accelerator, model = setup.recipe, setup.session.accelerator, setup.transformer
    environment = probe_environment()
    named = (*model.named_parameters(), *model.named_buffers())
    layout = [(name, tuple(x.shape), str(x.dtype), x.requires_grad) for name, x in named]
    return {
        "what": "kernels",
        "version": __version__,
        "sources": sources_digest(),
        "packages": dict(environment.versions),
        "python": environment.python,
        "cuda": environment.torch_cuda,
        "device": device_facts(accelerator.device),
        "ranks": (accelerator.num_processes, type(setup.engine).__name__),
        "transformer": setup.data.transformer_digest,
        "layout": hashlib.sha256(repr(layout).encode()).hexdigest(),
        "modules": sorted({str(type(module)) for module in model.modules()}),
        "dtype": str(setup.dtype),
        "shapes": [{n: list(x.shape) for n, x in one.tensors.items()} for one in batches],
        "switches": sorted(switch.name for switch in parity.switches),
        "places": sorted(parity.places),
        "passes": PASSES,
        "kernels": recipe.kernels.model_dump(mode="json"),
        "lora": recipe.lora.model_dump(mode="json"),
        "quantize": recipe.model.quantize,
        "compile": str(recipe.train.compile),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    }


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return what tells one device from another, as JSON."""
    if device.type != "cuda":
        return {"name": device.type, "capability": torch.backends.cpu.get_cpu_capability()}
    gpu = torch.cuda.get_device_properties(device)
    # A kernel may be wrong on one GPU alone.
    return {"name": gpu.name, "capability": (gpu.major, gpu.minor), "uuid": str(gpu.uuid)}
