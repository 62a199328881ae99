"""Initializes LoRA A matrices from the inputs their layers receive on training data: EVA (arXiv 2410.07170).

The rows of A are the directions of largest variance among a layer's inputs, from PEFT's incremental PCA. B is zero, so
the model still equals the base. The ranks of the recipe are kept: none are moved between layers.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast
from peft.tuners.lora import LoraLayer
from peft.utils.incremental_pca import IncrementalPCA
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.environment.progress_bar import ProgressBar
from dit_lora.errors import DitLoraError
from dit_lora.families.base import TrainableCheckpoint
from dit_lora.numerics.eval_mode import use_eval_mode
from dit_lora.numerics.streams import RandomStreams, derive_seed
from dit_lora.training.session.session import Session

NUM_SAMPLES = 32
"""Number of samples to look at, spread evenly over the training set; each is run once."""
# Rows per layer and forward pass.
_MAX_ROWS = 1024


def initialize_lora_from_data(session: Session, checkpoint: TrainableCheckpoint, data: Any, model: nn.Module) -> str:
    """Set A of every adapted linear layer from principal components of its inputs (EVA), equally on all ranks.

    Returns a line that reports it.

    Runs the whole model on this rank's device. Layers that receive fewer rows than their rank keep their random
    initialization, and are counted in the line. Raises `DitLoraError` with offload or sharded weights.
    """
    recipe, device = session.recipe, session.accelerator.device
    if recipe.train.offload != "none" or session.sharding is not None:
        raise DitLoraError(
            "lora.init: eva needs the whole model on one device, so it does not work with train.offload or "
            "sharded weights; use kaiming or pissa"
        )
    layers = {
        name: LayerInputs(layer)
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), nn.Linear)
    }
    # The model is moved back afterwards: the engine places it later.
    home = next(model.parameters()).device
    model.to(device)
    entries = data.training_set.entries
    # Evenly spaced, with repetitions in a small data set, which the next line drops.
    chosen = [entries[at * len(entries) // NUM_SAMPLES] for at in range(NUM_SAMPLES)]
    chosen = list({entry.id: entry for entry in chosen}.values())
    bar = ProgressBar(chosen, desc="EVA", unit="sample", leave=False, disable=not session.is_main)
    with use_eval_mode(model), ExitStack() as hooks, session.accelerator.autocast():
        for inputs in layers.values():
            hooks.enter_context(inputs.layer.register_forward_pre_hook(partial(LayerInputs.add_rows, inputs)))
        for entry in bar:
            sample = data.training_set.read_sample(entry, 0)
            if sample.faults:
                continue
            batch = sample.to(device)
            streams = RandomStreams(derive_seed(recipe.train.seed, "eva"), batch.sample_seeds)
            checkpoint.losses(model, batch.tensors, streams)
    unchanged_layers = [name for name, inputs in layers.items() if not inputs.set_lora_a()]
    model.to(home)
    message = f"lora.init: eva: {len(layers) - len(unchanged_layers)} layers start from {len(chosen)} samples"
    return (
        f"{message}; {len(unchanged_layers)} layers had too few rows for their rank" if unchanged_layers else message
    )


class LayerInputs:
    """Incremental principal components of one layer's inputs."""

    def __init__(self, layer: LoraLayer) -> None:
        self.layer: Any = layer
        self.rank = self.layer.r[ADAPTER_NAME]
        self._pca = IncrementalPCA(n_components=self.rank, lowrank=True, lowrank_seed=0)
        self._rows = torch.empty(0)

    def add_rows(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook: adds evenly spaced rows of the layer's input, (..., in_features)."""
        # (..., in_features) to (rows, in_features), then at most `_MAX_ROWS` of them.
        rows = inputs[0].detach().flatten(0, -2).float()
        rows = rows[:: max(1, -(-len(rows) // _MAX_ROWS))]
        # Rows of a bad sample are left out; training meets the sample too, and reports it.
        rows = rows[torch.isfinite(rows).all(dim=1)]
        self._rows = torch.cat([self._rows.to(rows), rows]) if self._rows.numel() else rows
        # PEFT's low-rank PCA needs at least twice as many rows as components.
        if len(self._rows) >= 2 * self.rank:
            self._pca.partial_fit(self._rows)
            self._rows = self._rows[:0]

    @torch.no_grad()
    def set_lora_a(self) -> bool:
        """Set A of one layer on all ranks to the components of rank 0. Returns False if there were too few rows."""
        # Missing until the first `partial_fit`.
        components = getattr(self._pca, "components_", None)
        if components is None:
            return False
        self.layer.lora_A[ADAPTER_NAME].weight.copy_(broadcast(components.contiguous()))
        return True
