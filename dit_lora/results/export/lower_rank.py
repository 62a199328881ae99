"""Lowers the rank of a LoRA: each layer gets the best approximation of its update at the new rank."""

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.diffusers_format import base_weights
from dit_lora.adapters.kinds import kind_of
from dit_lora.errors import DitLoraError
from dit_lora.results.export.formats import Exported
from dit_lora.results.export.low_rank import RankChoice, factor_update
from dit_lora.results.export.low_rank_result import LowRankResult, attach_layers, ranks_of
from dit_lora.results.export.updates import updates_of
from dit_lora.results.verify.checks import PATTERNS


def lower_rank(
    adapter: Exported, choice: RankChoice, name: str, part: str
) -> tuple[Exported, LowRankResult]:
    """Lower an adapter's rank. Also returns a report on what the new rank keeps.

    Layers whose rank is already low enough, and base weights that were trained too, stay as they are.

    Args:
        adapter: The adapter on a model without weights.
        choice: The new rank.
        name: Name of the adapter in messages.
        part: The transformer that it is for.

    Raises:
        DitLoraError: The adapter is not a LoRA, or no layer has a rank above `choice.rank`.
    """
    model, metadata = adapter.model, adapter.made
    kind = kind_of(model.peft_config[ADAPTER_NAME])
    if kind != "lora":
        raise DitLoraError(f"--rank lowers the rank of LoRAs; {name} is of the kind {kind}")
    # One term per layer, since the adapter is a single LoRA.
    updates = {layer: term for layer, (term,) in updates_of(model).items()}
    highest = max(term.rank for term in updates.values())
    if choice.rank is not None and choice.rank >= highest:
        raise DitLoraError(
            f"--rank {choice.rank} lowers nothing: the ranks of {name} are at most {highest}"
        )
    layers = []
    for layer, term in updates.items():
        # A layer below the new rank keeps its own rank.
        layer_choice = choice
        if choice.rank is not None:
            layer_choice = RankChoice(min(choice.rank, term.rank))
        layers.append(factor_update(layer, term, layer_choice))
    result = LowRankResult(layers, {}, part)
    # The factors have new shapes, so they are attached to a fresh model.
    smaller = adapter.hollow()
    factors = {layer.name: layer.stored for layer in layers}
    attach_layers(smaller, factors, adapter.family, f"{name} at a lower rank", base_weights(model))
    # Drop the recorded output: it belongs to the full update.
    remaining = {key: metadata[key] for key in metadata if key not in ("output", "lora", *PATTERNS)}
    old_ranks = {key: metadata[key] for key in ("rank", "alpha") if key in metadata}
    header = {**remaining, **ranks_of(smaller), "resized": {**old_ranks, "energy": result.energy}}
    lowered = Exported(smaller, header, adapter.family, adapter.pipeline_class, adapter.hollow)
    return lowered, result
