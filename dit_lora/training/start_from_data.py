"""Starts a LoRA's A from what its layers are given by the training data: EVA (arXiv 2410.07170).

A's rows are the directions of most variance among a layer's inputs; B is zero, so that the model is the base still. By
PEFT's incremental principal components. Ranks stay those of the recipe: none are moved between layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast
from peft.tuners.lora import LoraLayer
from peft.utils.incremental_pca import IncrementalPCA
from torch import nn
from tqdm import tqdm

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Trained
from dit_lora.numerics.streams import Streams, fold
from dit_lora.training.execution.modes import evaluating
from dit_lora.training.session.session import Session

SAMPLES = 32
"""Samples that are looked at, spread evenly over the training set; each is run once."""
_ROWS = 1024  # of one layer's inputs in one pass


def start_from_data(session: Session, checkpoint: Trained, data: Any, model: nn.Module) -> str:
    """Set every adapted linear layer's A, alike on every rank; return a line that says so.

    The whole model is run on this rank's device. Layers that are given fewer rows than their rank keep their random
    start, and are counted. Raises `DitLoraError` where the model is never whole on a device.
    """
    recipe, device = session.recipe, session.accelerator.device
    if recipe.train.offload != "none" or session.sharding is not None:
        raise DitLoraError(
            "lora.init: eva runs the whole model on one device before training, "
            "which train.offload and sharded weights "
            "do not have; start from kaiming, or from pissa"
        )
    layers = {
        name: LayerInputs(layer)
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), nn.Linear)
    }
    home = next(model.parameters()).device
    model.to(device)
    entries = data.clips.entries
    chosen = [entries[at * len(entries) // SAMPLES] for at in range(SAMPLES)]
    chosen = list({entry.id: entry for entry in chosen}.values())
    bar = tqdm(chosen, desc="EVA", unit="sample", leave=False, disable=not session.is_main)
    with evaluating(model), _watched(layers), session.accelerator.autocast():
        for entry in bar:
            sample = data.clips.sample(entry, 0)
            if sample.faults:
                continue
            batch = sample.to(device)
            checkpoint.losses(
                model, batch.tensors, Streams(fold(recipe.train.seed, "eva"), batch.draws)
            )
    kept = [name for name, seen in layers.items() if not seen.put()]
    model.to(home)
    words = f"lora.init: eva: {len(layers) - len(kept)} layers start from {len(chosen)} samples"
    return f"{words}; {len(kept)} were given fewer rows than their rank" if kept else words


class LayerInputs:
    """The principal components of what one layer is given."""

    def __init__(self, layer: LoraLayer) -> None:
        self.layer: Any = layer
        self.rank = self.layer.r[ADAPTER_NAME]
        self._pca = IncrementalPCA(n_components=self.rank, lowrank=True, lowrank_seed=0)
        self._rows = torch.empty(0)

    def take(self, _module: nn.Module, given: tuple[Any, ...]) -> None:
        """Add rows of the layer's input (..., inputs), evenly spread."""
        rows = given[0].detach().flatten(0, -2).float()
        rows = rows[:: max(1, -(-len(rows) // _ROWS))]
        # What a bad sample gives is left out here; training meets it too, and says what is wrong.
        rows = rows[torch.isfinite(rows).all(dim=1)]
        self._rows = torch.cat([self._rows.to(rows), rows]) if self._rows.numel() else rows
        # PEFT looks for twice the components, which so many rows have.
        if len(self._rows) >= 2 * self.rank:
            self._pca.partial_fit(self._rows)
            self._rows = self._rows[:0]

    @torch.no_grad()
    def put(self) -> bool:
        """Set A, from the first rank's components on all; return whether there were any."""
        found = getattr(self._pca, "components_", None)
        if found is None:
            return False
        self.layer.lora_A[ADAPTER_NAME].weight.copy_(broadcast(found.contiguous()))
        return True


@contextmanager
def _watched(layers: dict[str, LayerInputs]) -> Iterator[None]:
    handles = [
        seen.layer.register_forward_pre_hook(partial(LayerInputs.take, seen))
        for seen in layers.values()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
