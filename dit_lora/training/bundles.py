"""Writes a run's bundles: a micro-batch, the trained weights and the facts to run it again elsewhere."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dit_lora.config.recipe import Recipe
from dit_lora.environment.versions import probe_environment
from dit_lora.guard.bundle import write_bundle
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.precision import DTYPES, Precision


def keep_bundle(
    folder: Path,
    micro_batch: MicroBatch,
    event: dict[str, Any],
    weights: Mapping[str, torch.Tensor],
    recipe: Recipe,
    precision: Precision,
    transformer_digest: str,
    switched_off: Sequence[str],
    start_peak: float,
) -> list[str]:
    """Write a bundle of a micro-batch, with the trained weights whole; return what did not fit."""
    facts = {
        "event": event,
        "recipe": recipe.model_dump(mode="json"),
        "replay": {
            "step": micro_batch.step,
            "micro_step": micro_batch.micro_step,
            "rank": micro_batch.rank,
            "ids": micro_batch.ids,
            "draws": micro_batch.draws,
            "faults": dict(micro_batch.faults),
        },
        "switched_off": list(switched_off),
        "start_peak": start_peak,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype is precision.dtype),
        "transformer_digest": transformer_digest,
        "packages": dict(probe_environment().versions),
    }
    limit = recipe.guard.bundle_mib
    return write_bundle(folder, facts, micro_batch.tensors, weights, limit_mib=limit)
