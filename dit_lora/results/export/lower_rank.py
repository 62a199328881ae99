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
    model, made = adapter.model, adapter.made
    kind = kind_of(model.peft_config[ADAPTER_NAME])
    if kind != "lora":
        raise DitLoraError(f"--rank lowers the rank of LoRAs; {name} is of the kind {kind}")
    updates = {layer: term for layer, (term,) in updates_of(model).items()}
    highest = max(term.rank for term in updates.values())
    if choice.rank is not None and choice.rank >= highest:
        raise DitLoraError(
            f"--rank {choice.rank} lowers nothing: the ranks of {name} are at most {highest}"
        )
    layers = []
    for layer, term in updates.items():
        layer_choice = choice
        if choice.rank is not None:
            layer_choice = RankChoice(min(choice.rank, term.rank))
        layers.append(factor_update(layer, term, layer_choice))
    result = LowRankResult(layers, {}, part)
    smaller = adapter.hollow()
    stored = {layer.name: layer.stored for layer in layers}
    attach_layers(smaller, stored, adapter.family, f"{name} at a lower rank", base_weights(model))
    # Drop the recorded output: it belongs to the full update.
    remaining = {key: made[key] for key in made if key not in ("output", "lora", *PATTERNS)}
    before = {key: made[key] for key in ("rank", "alpha") if key in made}
    header = {**remaining, **ranks_of(smaller), "resized": {**before, "energy": result.energy}}
    lowered = Exported(smaller, header, adapter.family, adapter.pipeline_class, adapter.hollow)
    return lowered, result
