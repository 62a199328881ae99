"""Checks of an adapter: its file's contents, and what its library loaded from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils.other import get_pattern_key

from dit_lora.adapters.kinds import compute_scaling, get_adapter_kind, get_alpha
from dit_lora.adapters.patterns import require_bounded_regex_patterns
from dit_lora.adapters.update_norms import EXTREME_UPDATE_RATIO, STRONG_UPDATE_RATIO, LoadedLayer, ModuleUpdate
from dit_lora.errors import format_list
from dit_lora.numerics.adapter_tensors import get_layer_name

Tensors = Mapping[str, torch.Tensor]
NOT_RECORDED = "not recorded"
PATTERN_KEYS = ("rank_pattern", "alpha_pattern")
"""Keys in PEFT's config, and in our metadata, for layers whose rank or alpha differs from the rest."""


@dataclass(frozen=True)
class VerificationCheck:
    """The outcome of one check of a verification."""

    passed: bool
    message: str

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "words": self.message}


def check_finite(problems: Sequence[str], num_tensors: int) -> VerificationCheck:
    """Check that no tensor has NaN or Inf. `problems` describes those that do, of `num_tensors` tensors."""
    if problems:
        summary = "not finite; use an earlier checkpoint, or train again:"
        return VerificationCheck(False, format_list(summary, problems))
    return VerificationCheck(True, f"all {num_tensors} tensors are finite")


def check_tensor_names(
    loader_name: str,
    file_tensors: Tensors,
    loaded_tensors: Tensors,
    target_layers: Sequence[str],
    base_weights: Sequence[str],
) -> VerificationCheck:
    """Check that every tensor of the file was loaded, and that none is missing.

    Args:
        loader_name: Name of the loading class, for messages.
        file_tensors: The file's tensors.
        loaded_tensors: The loaded adapter's tensors.
        target_layers: Layers that the target modules in the header match.
        base_weights: Names of the base weights stored with the adapter.
    """
    # In the file and not loaded.
    problems = [f"{name}: {loader_name} does not load it" for name in file_tensors if name not in loaded_tensors]
    # Loaded and not in the file: the loader initialised it.
    for name, tensor in loaded_tensors.items():
        if name in file_tensors:
            continue
        # Zeros are fine in layers that the header does not target, such as Wan's image keys and values if only those
        # for text were trained. On the meta device there are no values, so only the layer is checked.
        is_zero = bool(target_layers) if tensor.is_meta else not tensor.any()
        if get_layer_name(name) in target_layers or not is_zero:
            problems.append(f"{name}: not in the file")
    modules = {get_layer_name(name) for name in loaded_tensors}
    if file_tensors.keys() <= loaded_tensors.keys():  # otherwise it may be loaded under another name
        message = "the header's targets match it, but the file has no tensors for it"
        problems += [f"{name}: {message}" for name in target_layers if name not in modules]
    # Loaded under the right name, with other values.
    problems += [
        f"{name}: {loader_name} loaded other values"
        for name, tensor in file_tensors.items()
        if name in loaded_tensors and not _is_same_tensor(tensor, loaded_tensors[name])
    ]
    if problems:
        summary = f"{loader_name} does not load the file as it is; use the file as the run wrote it"
        return VerificationCheck(False, format_list(summary, problems))
    if not file_tensors:
        return VerificationCheck(
            True, f"{loader_name} loads all {len(base_weights)} base weights; there is no adapter"
        )
    base_note = f", and {len(base_weights)} base weights" if base_weights else ""
    counts = f"{len(file_tensors)} tensors of {len(modules)} modules{base_note}"
    return VerificationCheck(True, f"{loader_name} loads all {counts}")


def _is_same_tensor(file_tensor: torch.Tensor, loaded_tensor: torch.Tensor) -> bool:
    """True if a file's tensor equals the loaded one in the loaded tensor's dtype.

    On the meta device only shapes are compared.
    """
    if loaded_tensor.is_meta:
        return file_tensor.shape == loaded_tensor.shape
    # Compare in the loaded dtype: a loader that lowers precision changes values on purpose.
    expected = file_tensor.to(loaded_tensor.device, loaded_tensor.dtype)
    if expected.shape != loaded_tensor.shape:
        return False
    return torch.allclose(expected, loaded_tensor, rtol=0, atol=0, equal_nan=True)


def check_adapter_effect(
    updates: Sequence[ModuleUpdate],
    base_weights: Sequence[str],
    base_changes: Sequence[ModuleUpdate] = (),
    *,
    allow_extreme: bool = False,
) -> VerificationCheck:
    """Check that at least one adapter update is larger than rounding error, and none is far larger than its weight.

    Modules with a strange size are named.

    Args:
        updates: The adapter's update of each module.
        base_weights: Names of the trained base weights.
        base_changes: Changes of those base weights.
        allow_extreme: Accept updates that are far larger than their weight.
    """
    # The check `check_finite` reports updates that are not finite.
    all_changes = (*updates, *base_changes)
    extreme = [o for o in all_changes if EXTREME_UPDATE_RATIO < (o.relative_to_typical or 0) < math.inf]
    if extreme and not allow_extreme:
        summary = (
            f"extreme, an update of more than {EXTREME_UPDATE_RATIO:g} times the weight that it is added to: almost "
            "nothing of the base is left, as after too high a learning rate; use an earlier checkpoint, or accept it "
            "with guard.allow_extreme_update=true (dit-lora verify --allow-extreme-update):"
        )
        return VerificationCheck(False, format_list(summary, _describe_relative_sizes(extreme)))
    if not updates:
        return VerificationCheck(True, f"no adapter: {len(base_weights)} base weights were trained in full")
    # Single dead modules are a note; all of them dead is a failure.
    dead = [update for update in updates if update.is_lost_to_rounding]
    if len(dead) == len(updates):
        # `relative_norm` is None where the weight's norm is unknown.
        max_share = max(update.relative_norm or 0.0 for update in updates)
        are = f"lost in rounding (at most {format_percent(max_share)} of their weights)" if max_share else "zero"
        return VerificationCheck(
            False,
            f"the adapter has no effect: the updates of all {len(updates)} modules are {are}; no gradient reached it "
            "that the optimizer could follow, or it was saved before it trained",
        )
    shares = [update.relative_norm for update in updates if update.relative_norm is not None]
    sizes = "; the norms of their weights are not known here"
    if shares:
        smallest, largest = format_percent(min(shares)), format_percent(max(shares))
        sizes = f", update {smallest if smallest == largest else f'{smallest[:-1]} to {largest}'} of their weights"
    lines = [f"{len(updates)} modules{sizes}"]
    if dead:
        lines.append(format_list("dead, their update is zero or lost in rounding:", [o.name for o in dead]))
    strong = [o for o in updates if o.relative_norm is not None and o.relative_norm > STRONG_UPDATE_RATIO]
    if strong:
        summary = (
            "very strong: the update is larger than the weight. If samples look broken, lower the learning "
            "rate, or load the adapter at a lower weight:"
        )
        lines.append(format_list(summary, _describe_relative_sizes(strong)))
    return VerificationCheck(True, "\n".join(lines))


def _describe_relative_sizes(updates: Sequence[ModuleUpdate]) -> list[str]:
    lines = []
    for update in updates:
        share = update.relative_to_typical if update.relative_norm is None else update.relative_norm
        if share is not None:
            lines.append(f"{update.name}: {format_percent(share)}")
    return lines


def format_percent(share: float) -> str:
    """Format a share in percent with two digits, or more before the point."""
    # Two digits below 100 %, such as 0.87 % or 12 %; no decimals above.
    value = 100 * share
    return f"{value:.0f}%" if value >= 100 else f"{value:.2g}%"


def check_scale(
    config: Mapping[str, Any] | None,
    layers: Mapping[str, LoadedLayer],
    ranks: Mapping[str, tuple[int, int]],
    metadata: Mapping[str, Any],
) -> VerificationCheck:
    """Check that rank and alpha agree in the header, the tensors, the loaded layers and the training metadata.

    Args:
        config: PEFT's config in the header; None without one.
        layers: The loaded layers.
        ranks: Ranks of A and of B in the file, by module.
        metadata: The training metadata.
    """
    if not ranks and not layers:
        return VerificationCheck(True, "no adapter, and so no rank and no alpha")
    # An orthogonal rotation has blocks instead of rank and alpha, and no scale.
    if get_adapter_kind(config) == "oft":
        # PEFT's name for the block size in the header, ours in the training metadata.
        size, trained = (config or {}).get("oft_block_size"), metadata.get("block_size")
        if trained and size != trained:
            return VerificationCheck(False, f"blocks of {size} in the header, and {trained} was trained")
        return VerificationCheck(True, f"{len(layers)} rotations in blocks of up to {size}, which have no scale")
    problems = [f"{name}: lora_A has rank {a}, lora_B {b}" for name, (a, b) in ranks.items() if a != b]
    # With a rank pattern, ranks differ by layer: `_find_training_differences` compares the loaded layers with it.
    if config and not config.get("rank_pattern"):
        header_rank = config.get("r")
        wrong_ranks = {name: a for name, (a, _) in ranks.items() if a != header_rank}
        problems += [f"{name}: rank {a} in the file, {header_rank} in its header" for name, a in wrong_ranks.items()]
    problems += _find_training_differences(config, layers, metadata)
    scales = sorted({layer.scaling for layer in layers.values()})
    if problems:
        summary = "rank and alpha do not agree; restore the file that the run wrote"
        return VerificationCheck(False, format_list(summary, problems))
    if not layers:
        return VerificationCheck(True, "the loaded layers' scale is not known: the file was not loaded")
    all_scales = ", ".join(f"{value:g}" for value in scales)
    # Layers may differ in rank; the message names at most three combinations.
    pairs = sorted({(layer.rank, layer.alpha) for layer in layers.values()})
    rank_text = "; ".join(f"rank {rank}, alpha {alpha:g}" for rank, alpha in pairs[:3])
    sources = [name for name, value in (("header", config), ("metadata", metadata.get("rank"))) if value]
    source = f"as in the {' and '.join(sources)}" if sources else f"{NOT_RECORDED}, so alpha equals rank"
    return VerificationCheck(True, f"{rank_text}, {source}; updates are scaled by {all_scales}")


def _find_training_differences(
    config: Mapping[str, Any] | None, layers: Mapping[str, LoadedLayer], metadata: Mapping[str, Any]
) -> list[str]:
    # Adapters of other programs have no training metadata to compare with.
    rank, alpha = metadata.get("rank"), metadata.get("alpha")
    if not rank or not alpha:
        return []
    problems = []
    if not config:
        problems.append(f"the header does not say rank and alpha: loaders take alpha {rank}, and {alpha} was trained")
    elif config.get("r") != rank:
        problems.append(f"rank {config.get('r')} in the header, but {rank} was trained")
    if config and get_alpha(config) != alpha:
        problems.append(f"alpha {get_alpha(config)} in the header, but {alpha} was trained")
    require_bounded_regex_patterns({key: metadata.get(key) for key in PATTERN_KEYS}, "the adapter's header")
    # Patterns map layer names, or regular expressions, to a rank or alpha other than the usual one.
    ranks, alphas = (metadata.get(key) or {} for key in PATTERN_KEYS)
    # A set: hundreds of layers with one wrong scale give one message.
    mismatched_scales = set()
    for name, layer in layers.items():
        # If the header has no alpha, loaders use the rank, so that the scale is 1.
        layer_alpha, layer_rank = (
            pattern.get(get_pattern_key(list(pattern), name), usual)
            for pattern, usual in ((alphas, alpha), (ranks, rank))
        )
        trained = compute_scaling(layer_alpha, layer_rank, rslora=metadata.get("rslora", False))
        if not math.isclose(layer.scaling, trained):
            mismatched_scales.add((layer.scaling, trained))
    problems += [
        f"loaded layers scale their update by {loaded_scale:g}, and {trained:g} was trained"
        for loaded_scale, trained in sorted(mismatched_scales)
    ]
    return problems
