"""Draws faults by a seed: place and kind in turn, everything else by chance."""

import random
from collections.abc import Sequence
from itertools import cycle

from benchmarks.faults.target_table import FAULT_TARGETS
from benchmarks.faults.tiny_data import CLIPS
from benchmarks.faults.world import World
from benchmarks.verdicts.cases import Case, Draw, Drawn, Place
from benchmarks.verdicts.places import PLACES

_TWO_RANKS = 0.3
"""The share of faults on two ranks, where both are asked for."""


def draw_faults(
    seed: int, count: int, variants: Sequence[str], ranks: Sequence[int], place_names: Sequence[str] = ()
) -> list[Drawn]:
    """Draw the faults of a sweep, by default of all places. Equal arguments give equal faults; longer sweeps add."""
    candidates = {name: entry for name, entry in PLACES.items() if not place_names or name in place_names}
    pairs = [(place_name, kind) for place_name, entry in candidates.items() for kind in entry.kinds]
    random.Random(seed).shuffle(pairs)
    pairs = [pair for pair in pairs if _fitting(PLACES[pair[0]], variants, ranks)]
    faults = []
    for number, (place_name, kind) in zip(range(count), cycle(pairs), strict=False):
        chance = random.Random(f"{seed}/{number}")
        fitting = _fitting(PLACES[place_name], variants, ranks)
        several = [pair for pair in fitting if pair[1] > 1]
        single_rank = [pair for pair in fitting if pair[1] == 1]
        has_both = bool(several) and bool(single_rank)
        chosen = several if not single_rank or (has_both and chance.random() < _TWO_RANKS) else single_rank
        variant, processes = chance.choice(chosen)
        aim = f"{chance.randrange(CLIPS):02d}"
        faults.append(Drawn(number, place_name, kind, variant, processes, aim, f"{seed}/{number}/case"))
    return faults


def case_of(fault: Drawn, world: World) -> Case:
    """What the fault's place makes of it."""
    chance = random.Random(fault.seed)
    draw = Draw(chance, FAULT_TARGETS[fault.variant], fault.ranks, world.target_clip, fault.kind)
    return PLACES[fault.place_name].make(draw)


def _fitting(entry: Place, variants: Sequence[str], ranks: Sequence[int]) -> list[tuple[str, int]]:
    return [(v, number) for v in variants for number in ranks if entry.fits(FAULT_TARGETS[v], number)]


def described() -> str:
    """What can be drawn, as text."""
    lines = ["places and kinds:"]
    for name, entry in PLACES.items():
        lines.append(f"  {name:18} {entry.description}")
        lines.append(f"  {'':18} {', '.join(entry.kinds)}")
    kinds = sum(len(entry.kinds) for entry in PLACES.values())
    lines.append(f"{len(PLACES)} places, {kinds} kinds; of each fault besides: the tiny checkpoint")
    lines.append(f"  ({', '.join(FAULT_TARGETS)}),")
    lines.append("one rank or two, the step (1 to 6), the rank at fault, the sample, the element.")
    return "\n".join(lines)
