"""Faults outside the training step: while clips are encoded, while validating, saving and resuming."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.fault import Expected, Fault
from benchmarks.faults.tiny_data import data_of
from benchmarks.faults.triggers import ALL_RANKS, Element, has_fault, write
from benchmarks.faults.world import Arm, Observation, Stage, Tensors, World
from dit_lora.config.data import VideoShape
from dit_lora.config.load import dump_recipe
from dit_lora.errors import DitLoraError
from dit_lora.files import write_atomically
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.patching import Patches


class _BadEncoder:
    """A video encoder that writes one bad value into the target. References and sound are encoded unchanged."""

    def __init__(self, encode: Any, world: World, value: float) -> None:
        self._encode, self._world, self._value = encode, world, value

    def __call__(self, pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
        encoded: Tensors = self._encode(pixels, image)
        if torch.equal(encoded["latent_mean"], self._world.target_latent):
            bad = Element(self._value, 4)
            encoded["latent_mean"] = bad(encoded["latent_mean"].contiguous())
        return encoded

    def encode_references(self, references: Sequence[torch.Tensor], shape: VideoShape) -> Tensors:
        latents: Tensors = self._encode.encode_references(references, shape)
        return latents

    def encode_sound(self, waveform: torch.Tensor, rate: int) -> Tensors:
        latents: Tensors = self._encode.encode_sound(waveform, rate)
        return latents


def _from_vae(name: str, value: float, message_part: str) -> Fault:
    """A VAE that gives a bad value for one clip, on whichever rank encodes it."""

    def play(fault: Fault, world: World) -> Observation:
        def load(inner: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return _BadEncoder(inner(*args, **options), world, value)

        # Only diffusion models have a VAE.
        opened_checkpoint: Any = world.family.open(world.recipe("", world.clips, world.root, ()).model)
        patches = Patches()
        patches.wrap_method(type(opened_checkpoint.encoders), "load_video_encoder", load)
        try:
            return world.observe(fault.name, None, fresh_cache=True)
        finally:
            patches.undo()

    expected = _refused("the encoder's output is not usable", message_part)
    return Fault(name, "caching", "before the run", expected, play=play, needs=("encoded",))


def _cut_clip(fault: Fault, world: World) -> Observation:
    """Run with a clip whose file breaks off."""

    def cut(folder: Path) -> None:
        clip = folder / world.target_clip
        data = clip.read_bytes()
        clip.write_bytes(data[: len(data) * 2 // 3])

    folder = world.copy_data(world.root / "cut_clips", cut)
    return world.observe(fault.name, None, clips=folder, fresh_cache=True)


def _eval_loss(stage: Stage) -> None:
    """Make the loss not finite whenever nothing is trained."""

    def change(output: Any, batch: Any, streams: Any) -> Any:
        if torch.is_grad_enabled():
            return output
        return type(output)(output.losses * torch.nan, output.timesteps)

    stage.checkpoint.after.append(change)


def _other_conversations(fault: Fault, world: World) -> Observation:
    """Measure a chat model on separate conversations; here they are those that it trains on."""
    override = ("validation.conversations", str(data_of(world.targets, world.clips)))
    return world.observe(fault.name, _eval_loss, (override,))


def _spoil_weight(stage: Stage, value: float) -> None:
    """Change this rank's part of the first trained weight that it has a part of."""
    parts = map(get_local_tensor, stage.trained().values())
    write(next(part for part in parts if part.numel()), Element(value, 3))


def _before_save(value: float, rank: int = ALL_RANKS) -> Arm:
    """Let a weight go bad between the last healthy step and its checkpoint, once."""

    def arm(stage: Stage) -> None:
        from dit_lora.training import fit as module

        pending = [True]

        def poisoned(check: Callable[..., None], *args: Any) -> None:
            # After the run's own check has passed, and before anything of step 3 is written.
            check(*args)
            if pending and args[-1] == 3:
                pending.clear()
                if has_fault(stage, rank):
                    _spoil_weight(stage, value)

        stage.wrap(module, "require_not_diverged", poisoned)

    return arm


def _before_adapter(stage: Stage) -> None:
    """Let a weight go bad after the last checkpoint, before the adapter is written."""

    def poisoned(write_adapter: Callable[..., Path], *args: Any) -> Path:
        _spoil_weight(stage, torch.nan)
        return write_adapter(*args)

    stage.wrap(type(stage.run.task), "save", poisoned)


def _disk_full(stage: Stage) -> None:
    from dit_lora.training.checkpoints import files as module

    def refuse(_write: Any, path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    def fill() -> None:
        stage.run.saved_checkpoints.writer.wait()  # the checkpoint of step 3, which is written beside the loop
        stage.wrap(module, "_write_synced", refuse)

    if stage.run.session.is_main:
        stage.before_step(4, fill)


def _resumed(name: str, damage: Callable[[Path], None]) -> Fault:
    """A fault of the newest checkpoint in a run that stopped half way and continues with train.resume=auto."""

    def play(fault: Fault, world: World) -> Observation:
        observation = world.observe(fault.name, None, (("train.steps", 5), ("train.save_every", 2)))
        if world.accelerator.is_main_process:
            damage(observation.folder / "checkpoints" / "step_000005")
        world.accelerator.wait_for_everyone()
        return world.observe(fault.name, None, _AUTO)

    return Fault(name, "resume", "step 5", _RESUMED, play=play)


def _truncate(checkpoint: Path) -> None:
    path = checkpoint / "trainable.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _poison(checkpoint: Path) -> None:
    """Write NaN into a byte-exact file: only its digest can tell."""
    path = checkpoint / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"
    path.write_bytes(bytes(data))


def _without_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def _killed(fault: Fault, world: World) -> Observation:
    """Kill a run (-9) in the middle of the checkpoint of step 3, with as many ranks as this suite has."""
    recipe = world.recipe(fault.name, world.clips, world.cache(fault.name), ())
    config = world.root / "killed.yaml"
    if world.accelerator.is_main_process:
        write_atomically(config, dump_recipe(recipe))
        ranks = world.accelerator.num_processes
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        # The suite's own place among ranks must not reach a launch of its own.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_TORCHRUN)}
        head = [sys.executable, *(launch if ranks > 1 else [])]
        killed = [*head, "-m", "benchmarks.faults.killed", str(config), world.engine]
        subprocess.run(killed, env=environment, capture_output=True)
        if not list((Path(recipe.run.dir) / "checkpoints").glob(".step_*.partial")):
            raise DitLoraError("kill -9 left no partial checkpoint: the fault was not injected")
    world.accelerator.wait_for_everyone()
    return world.observe(fault.name, None, _AUTO)


def _refused(*message_parts: str, exit_code: int = 2) -> Expected:
    return Expected("refused", "refused", message_parts, exit_code=exit_code)


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""The beginnings of the names of torchrun's variables."""
_AUTO = (("train.resume", "auto"),)
_ROLLED = Expected("weights", "rollback", same_as="clean")
_RESUMED = Expected("none", "none", same_as="clean")
_EVAL_LOSS = (("validation.eval_draws", 1),)
_EVAL_LOSS_NAN = Expected("unknown", "report", ("eval loss",), same_as="clean")
_DISK_FULL = _refused("No space left", "step_000003")
_NAN, _INF = torch.nan, torch.inf
FAULTS: tuple[Fault, ...] = (
    _from_vae("NaN from the VAE", _NAN, "1 NaN"),
    _from_vae("Inf from the VAE", _INF, "1 Inf"),
    Fault("a clip that breaks off", "media", "before the run", _refused("02_"), play=_cut_clip),
    Fault(
        "an eval loss that is NaN",
        "validation",
        "before and after",
        _EVAL_LOSS_NAN,
        _eval_loss,
        _EVAL_LOSS,
        needs=("encoded",),
    ),
    Fault(
        "a loss of other conversations that is NaN",
        "validation",
        "before and after",
        _EVAL_LOSS_NAN,
        play=_other_conversations,
        needs=("experts",),
    ),
    Fault("NaN in a weight while saving", "saving", "after step 3", _ROLLED, _before_save(_NAN)),
    Fault(
        "Inf in a weight of one rank while saving",
        "saving",
        "after step 3, rank 1",
        _ROLLED,
        _before_save(_INF, rank=1),
    ),
    Fault(
        "NaN in a weight before the adapter is written",
        "saving",
        "at the end",
        _refused("cannot save", exit_code=1),
        _before_adapter,
        engines=("ddp", "zero2"),  # FSDP2 has gathered what is written by then
    ),
    Fault("a full disk while saving", "saving", "step 6", _DISK_FULL, _disk_full),
    _resumed("a truncated checkpoint", _truncate),
    _resumed("a NaN written into a checkpoint", _poison),
    _resumed("a checkpoint without its manifest", _without_manifest),
    Fault("kill -9 in a save", "saving", "step 3", _RESUMED, play=_killed),
)
