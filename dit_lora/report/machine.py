"""Shows what `plan --json` and `doctor --json` say: a bar of a run's memory on a GPU, and problems of this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dit_lora.report.run.history import ensure_dict

BAR_WIDTH = 600
"""Width of a memory bar in units of its view box."""
_MIN_OVERHEAD_GIB = 1e-6  # less is rounding of the sum


@dataclass(frozen=True)
class BarPart:
    """A part of a training step's memory."""

    name: str
    gib: str
    x: float
    width: float


@dataclass(frozen=True)
class MemoryBar:
    """Memory of a run on one GPU: the parts of a training step, and what the phase with the most needs."""

    parts: Sequence[BarPart]
    limit_x: float | None
    """Where the GPU's memory ends; None without a GPU."""
    headline: str
    fits: bool
    changes: str
    """Overrides that make the run fit; empty if it fits, or if none are known."""
    assumptions: Sequence[str]


@dataclass(frozen=True)
class MachineProblem:
    """A problem that `doctor` has found."""

    severity: str
    message: str
    remedy: str


def build_memory_bar(plan: Mapping[str, Any]) -> MemoryBar:
    """The bar of a plan's JSON."""
    # Parts that a run does not have, such as an average of weights, are 0.
    sizes = {name: float(size) for name, size in ensure_dict(plan.get("training")).items() if size}
    phases = {name: float(size) for name, size in ensure_dict(plan.get("phases")).items()}
    needed_gib = max(phases.values(), default=0.0)
    # The parts are tensors; a GPU's phases also count its context and the allocator's rounding.
    overhead_gib = phases.get("training", 0.0) - sum(sizes.values())
    if overhead_gib > _MIN_OVERHEAD_GIB:
        sizes["CUDA and rounding"] = overhead_gib
    limit_gib, fits = plan.get("gpu"), bool(plan.get("fits"))
    # The bar shows the card and everything that is needed, also where that is more than the card has.
    scale = BAR_WIDTH / max(needed_gib, sum(sizes.values()), limit_gib or 0.0, 1e-9)
    parts, x = [], 0.0
    for name, size in sizes.items():
        parts.append(BarPart(name.replace("_", " "), f"{size:.3g}", round(x, 1), round(size * scale, 1)))
        x += size * scale
    # Without a GPU `fits` says nothing.
    headline = f"needs {needed_gib:.3g} GiB; no GPU was found, so give a size to compare with"
    if limit_gib is not None:
        headline = f"{'fits' if fits else 'does not fit'}: {needed_gib:.3g} of {limit_gib:.3g} GiB"
    return MemoryBar(
        parts=parts,
        limit_x=None if limit_gib is None else round(limit_gib * scale, 1),
        headline=headline,
        fits=fits or limit_gib is None,
        changes="\n".join(ensure_dict(plan.get("cheapest_change")).get("overrides", ())),
        assumptions=plan.get("assumed", ()),
    )


def list_machine_problems(report: Mapping[str, Any]) -> list[MachineProblem]:
    """The problems in the JSON of `doctor`: of packages, of their combination, and of the launch."""
    # A package without a problem has null here.
    entries = [*ensure_dict(report.get("packages")).values(), *report.get("known_bad", ())]
    problems = [
        MachineProblem(str(entry.get("severity")), str(entry["what"]), str(entry.get("remedy") or ""))
        for entry in entries
        if entry.get("what")
    ]
    launch_problem = ensure_dict(report.get("launch")).get("problem")
    return [*problems, MachineProblem("refuse", str(launch_problem), "")] if launch_problem else problems
