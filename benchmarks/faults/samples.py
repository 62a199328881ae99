"""Faults of samples: their cache entries, their random inputs, their losses."""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from benchmarks.faults.arms import every_row, losses, sample_tensor, target_rows
from benchmarks.faults.fault import Expected, Fault
from benchmarks.faults.media.cache import damaged, flip, poisoned
from benchmarks.faults.triggers import Element, When, times
from benchmarks.faults.world import Arm, Stage
from dit_lora.data.cache.shards import StoredEntry
from dit_lora.data.loading.batch import make_sample_seed
from dit_lora.numerics.streams import derive_seed

_NAN, _INF = math.nan, math.inf
_PLACES = {
    "latent_mean": ("latent", ("encoded",)),
    "latent_logvar": ("posterior", ("posterior",)),
    "prompt_embeds": ("text", ("text",)),
    "reference_0": ("reference", ("pairs",)),
    "loss_mask": ("mask", ("pairs",)),
    "audio_latent_mean": ("sound", ("sound",)),
}
"""Location of a fault in a tensor, and the attributes that `FaultTargets` needs for it."""
# Samples that are good, and something that is drawn for them or computed of them is not.
_ALWAYS = Expected("data", "quarantine", names_target=True, same_as="without")
_TRANSIENT = Expected("transient", "retry", same_as="clean")
_THIS_DRAW = Expected("inputs", "skip", ("with this noise",), names_target=True)
_LATE_DRAW = Expected("inputs", "skip", ("with this noise and timestep",), module="{time_proj}")


def _cached(name: str, message_part: str, tensor: str, damage: Callable[[StoredEntry], None]) -> Fault:
    """A damaged cache entry whose header is still correct."""
    # The target's file is 02_blue_disc; its caption names its colour and shape.
    folder, aim = ("texts", "blue disc") if tensor == "prompt_embeds" else ("videos", "02_")
    required = dict.fromkeys(("encoded", *_PLACES[tensor][1]))
    return Fault(
        name,
        "cache",
        "from the start",
        Expected("data", "quarantine", (message_part,), True, None, "without"),
        before_start=damaged(folder, aim, damage),
        needs=tuple(required),
    )


def _of_target(
    name: str, location: str, strike: Callable[[When], Arm], once: bool, needs: tuple[str, ...] = ()
) -> Fault:
    if once:
        return Fault(name, location, "once", _TRANSIENT, strike(When("once", 1)), needs=needs)
    return Fault(name, location, "every time", _ALWAYS, strike(When("from", 0)), needs=needs)


def _read(name: str, tensor: str, value: float, *, once: bool = False) -> Fault:
    """A tensor that is bad after it was read, as from a broken transform or bad memory."""
    target, required = _PLACES[tensor]
    strike = partial(sample_tensor, tensor, Element(value, 3))
    return _of_target(name, target, strike, once, required)


def _loss(name: str, value: float, *, once: bool = False) -> Fault:
    return _of_target(name, "loss", partial(losses, times(value), target_rows), once)


def _micro_step(name: str, when: str, moment: When) -> Fault:
    """A NaN loss in one micro-step of the third step."""
    return Fault(name, "loss", when, _TRANSIENT, losses(times(_NAN), every_row, moment))


def _draw(name: str, value: float, stream: str, need: str) -> Fault:
    """A bad value in the target's random noise, only in its second epoch."""

    def arm(stage: Stage) -> None:
        # A sample's generator is seeded from its draw number: a draw is known by its seed, in replays too.
        draw = make_sample_seed(stage.target_clip, epoch=1)
        bad = derive_seed(stage.run.recipe.train.seed, stream, draw) & 0xFFFFFFFF

        def draw_normal(
            normal: Callable[..., torch.Tensor],
            shape: Sequence[int],
            generators: Sequence[torch.Generator],
        ) -> torch.Tensor:
            noise = normal(shape, generators)
            for row, generator in enumerate(generators):
                if generator.initial_seed() == bad:
                    noise[row].view(-1)[5] = value
            return noise

        for module_name, module in list(sys.modules.items()):  # each family imports the function by name
            if module_name.startswith("dit_lora.families.") and hasattr(module, "draw_normal_noise"):
                stage.wrap(module, "draw_normal_noise", draw_normal)

    return Fault(name, stream, "step 3", _THIS_DRAW, arm, needs=(need,))


def _bad_timestep(stage: Stage) -> None:
    """Make the timestep embedding not finite at the timesteps of the schedule's end."""

    def late(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (
            args[0].float() * torch.where(args[0] > stage.targets.late, torch.inf, 1.0),
            *args[1:],
        )

    stage.module("{time_proj}").register_forward_pre_hook(late)


CACHED: tuple[Fault, ...] = (
    *(
        _cached(f"{kind} in a cached {tensor}", description, tensor, poisoned(tensor, value, count))
        for kind, value, description, count in (
            ("NaN", _NAN, "1 NaN among", 1),
            ("Inf", _INF, "3 Inf among", 3),
            ("-Inf", -_INF, "1 Inf among", 1),
            ("a huge value", 3e30, "beyond 10000", 1),
        )
        for tensor in _PLACES
    ),
    _cached("a bit flipped in a cache entry", "digest differs", "latent_mean", flip),
)
DRAWN: tuple[Fault, ...] = (
    _read("NaN in a latent at every read", "latent_mean", _NAN),
    _read("Inf in a latent at every read", "latent_mean", _INF),
    _read("NaN in a posterior logvar", "latent_logvar", _NAN),
    _read("an overflowing posterior logvar", "latent_logvar", 500.0),
    _read("NaN in a text embedding", "prompt_embeds", _NAN),
    _read("Inf in a text embedding", "prompt_embeds", _INF),
    _read("NaN in a reference at every read", "reference_0", _NAN),
    _read("NaN in a mask at every read", "loss_mask", _NAN),
    _read("NaN in audio latents at every read", "audio_latent_mean", _NAN),
    _read("NaN in a latent, once", "latent_mean", _NAN, once=True),
    _read("Inf in a text embedding, once", "prompt_embeds", _INF, once=True),
    _loss("NaN loss of one sample", _NAN),
    _loss("Inf loss of one sample", _INF),
    _loss("NaN loss, once", _NAN, once=True),
    _loss("Inf loss, once", _INF, once=True),
    _micro_step("NaN loss in the last micro-step", "step 3, micro-step 1", When("once", 3, skipped=1)),
    _micro_step("NaN loss in the first micro-step of one rank", "step 3, rank 1", When("once", 3, rank=1)),
    _draw("NaN in the noise of one draw", _NAN, "noise", "encoded"),
    _draw("Inf in the noise of one draw", _INF, "noise", "encoded"),
    _draw("NaN in the audio noise of one draw", _NAN, "audio_noise", "sound"),
    _draw("NaN in a posterior draw", _NAN, "posterior", "posterior"),
    Fault(
        "late timesteps that are not finite",
        "timestep",
        "late timesteps",
        _LATE_DRAW,
        _bad_timestep,
        needs=("time_proj",),
    ),
)
FAULTS = (*CACHED, *DRAWN)
