"""Turns what stands out in a healthy step into events: reported, and nothing is done about it."""

from collections.abc import Sequence

from dit_lora.guard.event import Event
from dit_lora.guard.spikes import Spike
from dit_lora.training.journal import IDLE


def spike_events(step: int, spikes: Sequence[Spike]) -> list[Event]:
    return [Event(step, "spike", {"cause": "unknown", "words": spike.words}) for spike in spikes]


def hidden_events(step: int, modules: Sequence[str]) -> list[Event]:
    """Return an event if values beyond the dtype's range were hidden from the loss by a clamp or a mask."""
    if not modules:
        return []
    shown = ", ".join(modules[:5]) + (f" and {len(modules) - 5} more" if modules[5:] else "")
    words = f"the loss is finite, but the output of {shown} is not: something hides it"
    verdict = {"cause": "precision", "words": words, "module": modules[0]}
    return [Event(step, "hidden_infinity", verdict)]


def held_out_event(step: int) -> Event:
    words = "the held-out loss is not finite; it is not recorded, and nothing is trained on it"
    return Event(step, "non_finite_validation", {"cause": "unknown", "words": words})


def idle_group_events(step: int, groups: Sequence[str]) -> list[Event]:
    """Return an event for each group whose gradient has been zero for many steps, while others have one."""
    return [
        Event(
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
