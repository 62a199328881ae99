"""What stands out in a healthy step, as events: reported, and nothing is done about it."""

from collections.abc import Sequence
from typing import Any

from dit_lora.numerics.spikes import Spike
from dit_lora.training.journal import IDLE


def spike_events(step: int, spikes: Sequence[Spike]) -> list[dict[str, Any]]:
    return [_event(step, "spike", {"cause": "unknown", "words": spike.words}) for spike in spikes]


def hidden_events(step: int, modules: Sequence[str]) -> list[dict[str, Any]]:
    """Values beyond the dtype's range that a clamp or a mask hid from the loss."""
    if not modules:
        return []
    shown = ", ".join(modules[:5]) + (f" and {len(modules) - 5} more" if modules[5:] else "")
    words = f"the loss is finite, but the output of {shown} is not: something hides it"
    verdict = {"cause": "precision", "words": words, "module": modules[0]}
    return [_event(step, "hidden_infinity", verdict)]


def held_out_event(step: int) -> dict[str, Any]:
    words = "the held-out loss is not finite; it is not recorded, and nothing is trained on it"
    return _event(step, "non_finite_validation", {"cause": "unknown", "words": words})


def idle_group_events(step: int, groups: Sequence[str]) -> list[dict[str, Any]]:
    """Groups whose gradient is zero in step after step, while others have one: nothing of them is trained."""
    return [
        _event(
            step,
            "zero_gradient_group",
            {
                "cause": "unknown",
                "words": f"the gradient of group {name} has been zero for {IDLE} steps, though others have one: "
                "nothing of it is trained (said once)",
            },
        )
        for name in groups
    ]


def _event(step: int, kind: str, verdict: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": step,
        "micro_step": None,
        "rank": 0,
        "kind": kind,
        "sample_ids": [],
        "verdict": verdict,
        "action": "report",
        "seconds": 0.0,
    }
