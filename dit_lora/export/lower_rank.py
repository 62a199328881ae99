"""Lowers the rank of a LoRA: each layer gets the best approximation of its update at the new rank."""

from dataclasses import replace

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.diffusers_format import get_base_weights
from dit_lora.adapters.kinds import get_adapter_kind
from dit_lora.errors import DitLoraError
from dit_lora.export.formats import ExportedAdapter
from dit_lora.export.low_rank import RankChoice, factor_update
from dit_lora.export.low_rank_result import LowRankResult, attach_lora_layers, get_rank_metadata
from dit_lora.export.weight_delta import collect_weight_updates
from dit_lora.verify.checks import PATTERN_KEYS


def lower_rank(
    adapter: ExportedAdapter, rank_choice: RankChoice, name: str, part: str
) -> tuple[ExportedAdapter, LowRankResult]:
    """Lower an adapter's rank. Also returns a report on what the new rank keeps.

    Layers whose rank is already low enough, and base weights that were trained too, stay as they are.

    Args:
        adapter: The adapter on a model without weights.
        rank_choice: The new rank.
        name: Name of the adapter in messages.
        part: The transformer that it is for.

    Raises:
        DitLoraError: The adapter is not a LoRA, or no layer has a rank above `rank_choice.rank`.
    """
    model, metadata = adapter.model, adapter.metadata
    kind = get_adapter_kind(model.peft_config[ADAPTER_NAME])
    if kind != "lora":
        raise DitLoraError(f"--rank lowers the rank of LoRAs; {name} is of the kind {kind}")
    # One term per layer, since the adapter is a single LoRA.
    updates = {layer: term for layer, (term,) in collect_weight_updates(model).items()}
    highest = max(term.rank for term in updates.values())
    if rank_choice.rank is not None and rank_choice.rank >= highest:
        raise DitLoraError(f"--rank {rank_choice.rank} lowers nothing: the ranks of {name} are at most {highest}")
    layers = []
    for layer, term in updates.items():
        # A layer below the new rank keeps its own rank.
        layer_choice = rank_choice if rank_choice.rank is None else RankChoice(min(rank_choice.rank, term.rank))
        layers.append(factor_update(layer, term, layer_choice))
    result = LowRankResult(layers, {}, part)
    # The factors have new shapes, so they are attached to a fresh model.
    smaller = adapter.build_empty_model()
    factors = {layer.name: layer.factors for layer in layers}
    attach_lora_layers(smaller, factors, adapter.family, f"{name} at a lower rank", get_base_weights(model))
    # Drop the recorded output: it belongs to the full update.
    remaining = {key: metadata[key] for key in metadata if key not in ("output", "lora", *PATTERN_KEYS)}
    old_ranks = {key: metadata[key] for key in ("rank", "alpha") if key in metadata}
    header = {**remaining, **get_rank_metadata(smaller), "resized": {**old_ranks, "energy": result.energy_share}}
    return replace(adapter, model=smaller, metadata=header), result
