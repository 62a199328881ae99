"""Faults of samples: what the cache holds, what is drawn for them, what their loss is."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dit_lora.data.cache.cache import TensorCache
from dit_lora.data.cache.shards import Stored
from dit_lora.data.loading.batch import draw_number
from dit_lora.faults.fault import Expected, Fault
from dit_lora.faults.world import TARGET, Arm, Stage, Tensors
from dit_lora.numerics import streams
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import Streams, fold


def _poison(value: float, tensor_name: str, folder: str, count: int = 1) -> Any:
    """Write a bad value into the target's cache entry, keeping its header."""

    def change(cache: Path) -> None:
        for entry in _targets(cache, folder):
            name = tensor_name
            if folder == "texts":  # families name it differently; a mask is not floating point
                name = next(n for n, (_, d) in entry.layout.spec.items() if d.is_floating_point)
            overwrite(entry, name, 7, torch.full((count,), value))

    return change


def _targets(cache: Path, folder: str) -> list[Stored]:
    entries = TensorCache(cache / folder).entries()
    return [entry for entry in entries if _is_targets(entry.sample, folder)]


def _is_targets(sample: str, folder: str) -> bool:
    # The target is 02_blue_disc; its caption names its colour and shape.
    if folder == "videos":
        return Path(sample).name.startswith(TARGET)
    return "blue disc" in sample


def overwrite(entry: Stored, name: str, first: int, values: torch.Tensor) -> None:
    """Put values into a tensor of an entry where it lies on the disk, from the element of number `first` on."""
    dtype = entry.layout.spec[name][1]
    with entry.path.open("r+b") as file:
        file.seek(entry.start + entry.layout.bounds[name][0] + first * dtype.itemsize)
        file.write(values.to(dtype).view(torch.uint8).numpy().tobytes())


def _truncate(cache: Path) -> None:
    for entry in _targets(cache, "videos"):
        with entry.path.open("r+b") as file:
            file.seek(entry.end - 5)
            (byte,) = file.read(1)
            file.seek(entry.end - 5)
            file.write(bytes([byte ^ 0xFF]))  # of a value: finite, and not what was written


_NEEDS = {"latent_logvar": ("posterior",), "prompt_embeds": ("text",)}  # beside being encoded


def cached() -> list[Fault]:
    """Return the faults of bad values on disk."""
    faults = [
        Fault(
            f"{kind} in a cached {tensor}",
            "cache",
            "from the start",
            Expected("data", "quarantine", (words,), True, None, "without"),
            before_start=_poison(value, tensor, folder, count),
            needs=("encoded", *_NEEDS.get(tensor, ())),
        )
        for kind, value, words, count in (
            ("NaN", torch.nan, "1 NaN among", 1),
            ("Inf", torch.inf, "3 Inf among", 3),
            ("-Inf", -torch.inf, "1 Inf among", 1),
            ("a huge value", 3e30, "beyond 10000", 1),
        )
        for tensor, folder in (
            ("latent_mean", "videos"),
            ("latent_logvar", "videos"),
            ("prompt_embeds", "texts"),
        )
    ]
    bit_flip = Fault(
        "a bit flipped in a cache entry",
        "cache",
        "from the start",
        Expected("data", "quarantine", ("digest differs",), True, None, "without"),
        before_start=_truncate,
        needs=("encoded",),
    )
    return [*faults, bit_flip]


def _in_target(value: float, tensor: str, *, once: bool = False) -> Arm:
    """Put a bad value into the target's row after it was read: a broken transform, or memory."""

    def arm(stage: Stage) -> None:
        pending = [True]
        name = (stage.site.text if tensor == "prompt_embeds" else None) or tensor

        def change(batch: Tensors, streams: Streams) -> Tensors:
            for row, is_target in enumerate(stage.is_target(batch)):
                if is_target and pending:
                    batch[name] = batch[name].clone()
                    batch[name][row].view(-1)[3] = value
                    if once:
                        pending.clear()
            return batch

        stage.checkpoint.before.append(change)

    return arm


def _loss_of_target(value: float, *, once: bool = False) -> Arm:
    """Add a loss that is not finite for one sample."""

    def arm(stage: Stage) -> None:
        pending = [True]

        def change(output: LossOutput, batch: Tensors, streams: Streams) -> LossOutput:
            losses = output.losses
            for row, is_target in enumerate(stage.is_target(batch)):
                if is_target and pending:
                    losses = losses.clone()
                    losses[row] = losses[row] * value
                    if once:
                        pending.clear()
            return LossOutput(losses, output.timesteps)

        stage.checkpoint.after.append(change)

    return arm


def _loss_in_micro_step(value: float, micro_step: int, rank: int = -1) -> Arm:
    """Spoil one micro-step of the third step, once; on one rank or on all."""

    def arm(stage: Stage) -> None:
        calls: list[int] = []
        stage.before_step(3, lambda: calls.append(0))

        def change(output: LossOutput, batch: Tensors, streams: Streams) -> LossOutput:
            if not calls:
                return output
            calls[0] += 1
            here = rank in (-1, stage.rank) or rank >= stage.ranks
            if here and calls[0] == micro_step + 1:
                return LossOutput(output.losses * value, output.timesteps)
            return output

        stage.checkpoint.after.append(change)

    return arm


def _with_one_draw(value: float, stream: str) -> Arm:
    """Put a bad value into what is drawn for the target in its second epoch, and only there."""

    def arm(stage: Stage) -> None:
        normal = streams.normal
        # A sample's generator is seeded from its draw number: a draw is known by its seed, in replays too.
        draw = draw_number(stage.target, epoch=1)
        bad = fold(stage.run.setup.recipe.train.seed, stream, draw) & 0xFFFFFFFF

        def drawn(shape: Sequence[int], generators: Sequence[torch.Generator]) -> torch.Tensor:
            noise = normal(shape, generators)
            for row, generator in enumerate(generators):
                if generator.initial_seed() == bad:
                    noise[row].view(-1)[5] = value
            return noise

        for name, module in list(sys.modules.items()):  # each family imports the function by name
            if name.startswith("dit_lora.families.") and hasattr(module, "normal"):
                stage.patch(module, "normal", drawn)

    return arm


def _bad_timestep(stage: Stage) -> None:
    """Make the timestep embedding not finite at the timesteps of the schedule's end."""

    def arm_module(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].float() * torch.where(args[0] > _LATE, torch.inf, 1.0), *args[1:])

    time_proj = stage.transformer.get_submodule(stage.site.named("{time_proj}"))
    time_proj.register_forward_pre_hook(arm_module)


_LATE = 900


# Samples that are good, and something that is drawn for them or computed of them is not.
_ALWAYS = Expected("data", "quarantine", names_target=True, same_as="without")
_TRANSIENT = Expected("transient", "retry", same_as="clean")
_THIS_DRAW = Expected("inputs", "skip", ("with this noise",), names_target=True)
_LATE_DRAW = Expected("inputs", "skip", ("with this noise and timestep",), module="{time_proj}")
DRAWN: tuple[Fault, ...] = (
    Fault(
        "NaN in a latent at every read",
        "latent",
        "every time",
        _ALWAYS,
        _in_target(torch.nan, "latent_mean"),
        needs=("encoded",),
    ),
    Fault(
        "Inf in a latent at every read",
        "latent",
        "every time",
        _ALWAYS,
        _in_target(torch.inf, "latent_mean"),
        needs=("encoded",),
    ),
    Fault(
        "NaN in a posterior logvar",
        "posterior",
        "every time",
        _ALWAYS,
        _in_target(torch.nan, "latent_logvar"),
        needs=("posterior",),
    ),
    Fault(
        "an overflowing posterior logvar",
        "posterior",
        "every time",
        _ALWAYS,
        _in_target(500.0, "latent_logvar"),
        needs=("posterior",),
    ),
    Fault(
        "NaN in a text embedding",
        "text",
        "every time",
        _ALWAYS,
        _in_target(torch.nan, "prompt_embeds"),
        needs=("text",),
    ),
    Fault(
        "Inf in a text embedding",
        "text",
        "every time",
        _ALWAYS,
        _in_target(torch.inf, "prompt_embeds"),
        needs=("text",),
    ),
    Fault(
        "NaN in a latent, once",
        "latent",
        "once",
        _TRANSIENT,
        _in_target(torch.nan, "latent_mean", once=True),
        needs=("encoded",),
    ),
    Fault(
        "Inf in a text embedding, once",
        "text",
        "once",
        _TRANSIENT,
        _in_target(torch.inf, "prompt_embeds", once=True),
        needs=("text",),
    ),
    Fault("NaN loss of one sample", "loss", "every time", _ALWAYS, _loss_of_target(torch.nan)),
    Fault("Inf loss of one sample", "loss", "every time", _ALWAYS, _loss_of_target(torch.inf)),
    Fault("NaN loss, once", "loss", "once", _TRANSIENT, _loss_of_target(torch.nan, once=True)),
    Fault("Inf loss, once", "loss", "once", _TRANSIENT, _loss_of_target(torch.inf, once=True)),
    Fault(
        "NaN loss in the last micro-step",
        "loss",
        "step 3, micro-step 1",
        _TRANSIENT,
        _loss_in_micro_step(torch.nan, 1),
    ),
    Fault(
        "NaN loss in the first micro-step of one rank",
        "loss",
        "step 3, rank 1",
        _TRANSIENT,
        _loss_in_micro_step(torch.nan, 0, rank=1),
    ),
    Fault(
        "NaN in the noise of one draw",
        "noise",
        "step 3",
        _THIS_DRAW,
        _with_one_draw(torch.nan, "noise"),
        needs=("encoded",),
    ),
    Fault(
        "Inf in the noise of one draw",
        "noise",
        "step 3",
        _THIS_DRAW,
        _with_one_draw(torch.inf, "noise"),
        needs=("encoded",),
    ),
    Fault(
        "NaN in a posterior draw",
        "posterior",
        "step 3",
        _THIS_DRAW,
        _with_one_draw(torch.nan, "posterior"),
        needs=("posterior",),
    ),
    Fault(
        "late timesteps that are not finite",
        "timestep",
        "t > 900",
        _LATE_DRAW,
        _bad_timestep,
        needs=("time_proj",),
    ),
)
