"""Checks of an adapter: its file's contents, and what its library loaded from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils.other import get_pattern_key

from dit_lora.adapters.kinds import alpha_of, kind_of, scaling_of
from dit_lora.adapters.patterns import require_bounded_patterns
from dit_lora.adapters.update_norms import EXTREME, STRONG, LoadedLayer, ModuleUpdate
from dit_lora.errors import listed
from dit_lora.numerics.adapter_tensors import layer_of

Tensors = Mapping[str, torch.Tensor]
NOT_RECORDED = "not recorded"
PATTERNS = ("rank_pattern", "alpha_pattern")
"""Keys in PEFT's config, and in our metadata, for layers whose rank or alpha differs from the rest."""


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    passed: bool
    words: str

    def record(self) -> dict[str, Any]:
        return {"passed": self.passed, "words": self.words}


def finite(bad: Sequence[str], count: int) -> Check:
    """Check that no tensor has NaN or Inf. `bad` describes those that do, of `count` tensors."""
    if bad:
        summary = "not finite; take an earlier checkpoint, or train again:"
        return Check(False, listed(summary, bad))
    return Check(True, f"all {count} tensors are finite")


def keys(
    loader: str, stored: Tensors, loaded: Tensors, expected: Sequence[str], base: Sequence[str]
) -> Check:
    """Check that every tensor of the file was loaded, and that none is missing.

    Args:
        loader: Name of the loading class, for messages.
        stored: The file's tensors.
        loaded: The loaded adapter's tensors.
        expected: Layers that the target modules in the header match.
        base: Names of the base weights stored with the adapter.
    """
    # In the file and not loaded.
    problems = [f"{name}: nothing of {loader} takes it" for name in stored if name not in loaded]
    # Loaded and not in the file: the loader initialised it.
    problems += [
        f"{name}: not in the file"
        for name, tensor in loaded.items()
        if name not in stored and not _is_idle(name, tensor, expected)
    ]
    modules = {layer_of(name) for name in loaded}
    if stored.keys() <= loaded.keys():  # otherwise it may be loaded under another name
        problems += [
            f"{name}: the header's targets match it, and the file has nothing for it"
            for name in expected
            if name not in modules
        ]
    # Loaded under the right name, with other values.
    problems += [
        f"{name}: {loader} did not take its values"
        for name, tensor in stored.items()
        if name in loaded and not _same(tensor, loaded[name])
    ]
    if problems:
        summary = f"{loader} does not load the file as it is; use the file as the run wrote it"
        return Check(False, listed(summary, problems))
    base_note = f", and {len(base)} base weights beside it" if base else ""
    if not stored:
        return Check(True, f"{loader} takes all {len(base)} base weights; there is no adapter")
    return Check(
        True,
        f"{loader} takes all {len(stored)} tensors of {len(modules)} modules{base_note}; none lacks",
    )


def _is_idle(name: str, tensor: torch.Tensor, expected: Sequence[str]) -> bool:
    """True for zeros that a loader adds, such as Wan's image keys and values if only those for text were trained.

    They belong to no layer in the header. On the meta device there are no values, so only that is checked.
    """
    # A layer that the header targets must have its tensors in the file.
    is_asked = layer_of(name) in expected
    return not is_asked and (bool(expected) if tensor.is_meta else not tensor.any())


def _same(stored: torch.Tensor, loaded: torch.Tensor) -> bool:
    """True if values are equal in the loaded tensor's dtype; only shapes are compared on the meta device."""
    if loaded.is_meta:
        return stored.shape == loaded.shape
    # Compare in the loaded dtype: a loader that lowers precision changes values on purpose.
    expected = stored.to(loaded.device, loaded.dtype)
    if expected.shape != loaded.shape:
        return False
    return torch.allclose(expected, loaded, rtol=0, atol=0, equal_nan=True)


def effect(
    updates: Sequence[ModuleUpdate],
    base: Sequence[str],
    changes: Sequence[ModuleUpdate] = (),
    *,
    allow_extreme: bool = False,
) -> Check:
    """Check that at least one update is larger than rounding error, and none is far larger than its weight.

    Modules with a strange size are named.

    Args:
        updates: The adapter's update of each module.
        base: Names of the trained base weights.
        changes: Changes of those base weights.
        allow_extreme: Accept updates that are far larger than their weight.
    """
    # The check `finite` reports updates that are not finite.
    extreme = [
        update for update in (*updates, *changes) if EXTREME < (update.share or 0) < math.inf
    ]
    if extreme and not allow_extreme:
        return _extreme(extreme)
    if not updates:
        return Check(True, f"no adapter: {len(base)} base weights were trained in full")
    # Single dead modules are a note; all of them dead is a failure.
    dead = [update for update in updates if update.is_lost]
    if len(dead) == len(updates):
        return _without_effect(updates)
    summary_line = f"{len(updates)} modules{_range(updates)}"
    notes = []
    if dead:
        notes.append(
            listed("dead, their update is zero or lost in rounding:", [o.name for o in dead])
        )
    strong = [
        update for update in updates if update.relative is not None and update.relative > STRONG
    ]
    if strong:
        summary = (
            "over-strong, their update is larger than the weight that it is added to; where samples break, lower the "
            "learning rate or load the adapter at a lower weight:"
        )
        notes.append(listed(summary, _relative(strong)))
    return Check(True, "\n".join([summary_line, *notes]))


def _without_effect(updates: Sequence[ModuleUpdate]) -> Check:
    """The failed check for an adapter whose updates all have no effect."""
    # `relative` is None where the weight's norm is unknown.
    largest = max((update.relative or 0.0 for update in updates), default=0.0)
    are = f"lost in rounding (at most {percent(largest)} of their weights)" if largest else "zero"
    return Check(
        False,
        f"the adapter has no effect: the updates of all {len(updates)} modules are {are}; no gradient reached it that "
        "the optimizer could follow, or it was saved before it trained",
    )


def _extreme(updates: Sequence[ModuleUpdate]) -> Check:
    """The failed check for updates that are far larger than their weight."""
    summary = (
        f"extreme, an update of more than {EXTREME:g} times the weight that it is added to: "
        "next to nothing of the base "
        "is left, as after a learning rate that is too high; take an earlier checkpoint, or let it pass with "
        "guard.allow_extreme_update=true (dit-lora verify --allow-extreme-update):"
    )
    return Check(False, listed(summary, _relative(updates)))


def _relative(updates: Sequence[ModuleUpdate]) -> list[str]:
    """Module names with the size of their update relative to their weight."""
    shares = [
        (update.name, update.share if update.relative is None else update.relative)
        for update in updates
    ]
    return [f"{name}: {percent(share)}" for name, share in shares if share is not None]


def _range(updates: Sequence[ModuleUpdate]) -> str:
    """Text on the smallest and largest relative update."""
    shares = [update.relative for update in updates if update.relative is not None]
    if not shares:
        return "; the norms of their weights are not known here"
    smallest, largest = percent(min(shares)), percent(max(shares))
    return f", update {smallest if smallest == largest else f'{smallest[:-1]} to {largest}'} of their weights"


def percent(share: float) -> str:
    """Format a share in percent with two digits, or more before the point."""
    # Two digits below 100 %, such as 0.87 % or 12 %; no decimals above.
    value = 100 * share
    return f"{value:.0f}%" if value >= 100 else f"{value:.2g}%"


def scale(
    config: Mapping[str, Any] | None,
    layers: Mapping[str, LoadedLayer],
    ranks: Mapping[str, tuple[int, int]],
    made: Mapping[str, Any],
) -> Check:
    """Check that rank and alpha agree in the header, the tensors, the loaded layers and the training metadata.

    Args:
        config: PEFT's config in the header; None without one.
        layers: The loaded layers.
        ranks: Ranks of A and of B in the file, by module.
        made: The training metadata.
    """
    if not ranks and not layers:
        return Check(True, "no adapter, and so no rank and no alpha")
    # An orthogonal rotation has blocks instead of rank and alpha.
    if kind_of(config) == "oft":
        return _blocks(config or {}, layers, made)
    problems = _in_the_file(config, ranks) + _as_trained(config, layers, made)
    scales = sorted({layer.scaling for layer in layers.values()})
    if problems:
        summary = "rank and alpha do not agree; restore the file that the run wrote"
        return Check(False, listed(summary, problems))
    if not layers:
        return Check(True, "the loaded layers' scale is not known: the file was not loaded")
    all_scales = ", ".join(f"{value:g}" for value in scales)
    # Layers may differ in rank; the message names at most three combinations.
    pairs = sorted({(layer.rank, layer.alpha) for layer in layers.values()})
    rank_text = "; ".join(f"rank {rank}, alpha {alpha:g}" for rank, alpha in pairs[:3])
    sources = [
        name
        for name, source_value in (("header", config), ("provenance", made.get("rank")))
        if source_value
    ]
    source = (
        f"as {' and '.join(sources)} say" if sources else f"{NOT_RECORDED}, so that alpha is rank"
    )
    return Check(True, f"{rank_text}, {source}: updates are scaled by {all_scales}")


def _blocks(
    config: Mapping[str, Any], layers: Mapping[str, LoadedLayer], made: Mapping[str, Any]
) -> Check:
    """Check that OFT's rotations are loaded with the trained block size. A rotation has no scale."""
    # PEFT's name for the block size in the header, ours in the training metadata.
    size, trained = config.get("oft_block_size"), made.get("block_size")
    if trained and size != trained:
        return Check(False, f"blocks of {size} in the header, and {trained} was trained")
    return Check(True, f"{len(layers)} rotations in blocks of up to {size}, which have no scale")


def _in_the_file(
    config: Mapping[str, Any] | None, ranks: Mapping[str, tuple[int, int]]
) -> list[str]:
    """Problems with the ranks of the file's tensors."""
    problems = [
        f"{name}: lora_A has rank {a}, lora_B {b}" for name, (a, b) in ranks.items() if a != b
    ]
    # With a rank pattern, ranks differ by layer: the loaded layers are compared with it in `_as_trained`.
    if config and not config.get("rank_pattern"):
        header_rank = config.get("r")
        problems += [
            f"{name}: rank {a} in the file, {header_rank} in its header"
            for name, (a, _) in ranks.items()
            if a != header_rank
        ]
    return problems


def _as_trained(
    config: Mapping[str, Any] | None, layers: Mapping[str, LoadedLayer], made: Mapping[str, Any]
) -> list[str]:
    """Differences in rank, alpha and scale from the training metadata."""
    # Adapters of other programs have no training metadata to compare with.
    rank, alpha = made.get("rank"), made.get("alpha")
    if not rank or not alpha:
        return []
    problems = []
    header = {"rank": config.get("r"), "alpha": alpha_of(config)} if config else {}
    for name, trained in (("rank", rank), ("alpha", alpha)):
        if config and header[name] != trained:
            problems.append(f"{name} {header[name]} in the header, and {trained} was trained")
    if not config:
        problems.append(
            f"the header does not say rank and alpha: loaders take alpha {rank}, and {alpha} was trained"
        )
    require_bounded_patterns({key: made.get(key) for key in PATTERNS}, "the adapter's header")
    # Patterns map layer names, or regular expressions, to a rank or alpha other than the usual one.
    ranks, alphas = (made.get(key) or {} for key in PATTERNS)
    # A set: hundreds of layers with one wrong scale give one message.
    mismatched_scales = set()
    for name, layer in layers.items():
        # If the header has no alpha, loaders use the rank, so that the scale is 1.
        layer_alpha, layer_rank = (
            pattern.get(get_pattern_key(list(pattern), name), usual)
            for pattern, usual in ((alphas, alpha), (ranks, rank))
        )
        trained = scaling_of(layer_alpha, layer_rank, rslora=made.get("rslora", False))
        if not math.isclose(layer.scaling, trained):
            mismatched_scales.add((layer.scaling, trained))
    problems += [
        f"loaded layers scale their update by {loaded_scale:g}, and {trained:g} was trained"
        for loaded_scale, trained in sorted(mismatched_scales)
    ]
    return problems
