"""Faults of a chat model's steps: answers without a label, experts that fail, precision, clips that rot."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.faults.arms import losses, module_output, target_rows
from benchmarks.faults.fault import Expected, Fault, equal, from_step
from benchmarks.faults.ops import BF16, CHECKED, op_of_target
from benchmarks.faults.triggers import Change, When, backward_of, divided, times
from benchmarks.faults.world import Arm, Observation, Stage, World
from dit_lora.data.loading.batch import Batch
from dit_lora.errors import CheckFailedError
from dit_lora.fuse import lora
from dit_lora.numerics.labels import IGNORE_INDEX
from dit_lora.training.tasks.chat.training_set import ChatEntry, ChatTrainingSet


def _no_labels(stage: Stage) -> None:
    """Cut answers on the right, as VideoChat2 does, which takes a long sample's whole answer (N12)."""

    def cut(read: Callable[..., Batch], clips: ChatTrainingSet, entry: ChatEntry, *args: Any) -> Batch:
        batch = read(clips, entry, *args)
        if entry.id != stage.target_clip:
            return batch
        labels = torch.full_like(batch.tensors["labels"], IGNORE_INDEX)
        return replace(batch, tensors={**batch.tensors, "labels": labels})

    stage.wrap(ChatTrainingSet, "_read_sample", cut)


def _fp16_scores(stage: Stage) -> None:
    """Compute the vision encoder's attention as the original does: q @ k in fp16, norms of 300, then softmax (N4)."""
    module, state = stage.module("{vision_attention}"), {"inside": False}
    fires = When("from", 3).fires(stage)
    module.register_forward_pre_hook(lambda *_: state.update(inside=True))
    module.register_forward_hook(lambda *_: state.update(inside=False))

    def attention(original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        if not (state["inside"] and fires()):
            return original(*args, **kwargs)
        query, key, value = args
        dtype = torch.float32 if query.dtype is torch.float32 else torch.float16
        long_query, long_key = (300 * F.normalize(states.to(dtype), dim=-1) for states in (query, key))
        # One direction that all share, as trained queries and keys have.
        scores = long_query.abs() @ long_key.abs().mT
        return scores.softmax(-1).to(value.dtype) @ value

    stage.wrap(F, "scaled_dot_product_attention", attention)


def _own_autocast(stage: Stage) -> None:
    """Enter fp16 autocast in one module regardless of the recipe, as `maybe_autocast` of the original does (N15)."""

    def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(stage.run.accelerator.device.type, dtype=torch.float16):
            return inner(*args, **kwargs)

    stage.wrap(stage.module("{vision_attention}"), "forward", forward)


def _half_trainables(stage: Stage) -> None:
    """Convert the adapter to fp16. PEFT attaches it in fp32, for every dtype of the base (N13)."""
    dtypes = {parameter.dtype for parameter in stage.trained().values()}
    if dtypes != {torch.float32}:
        raise CheckFailedError(f"attached in {dtypes}, not in fp32")
    for parameter in stage.trained().values():
        parameter.data = parameter.data.half()


def _new_token(stage: Stage) -> None:
    """Teach the tokenizer a word that the model has not learned: an index beyond the table of embeddings."""
    stage.checkpoint.tokenizer.add_tokens([_WORD])


def _fused_lora(change: Change, when: When) -> Arm:
    """Let the fused LoRA layer go wrong; PEFT's own is right."""

    def arm(stage: Stage) -> None:
        fires = when.fires(stage)

        def project(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Sequence[torch.Tensor]:
            outputs = original(*args, **kwargs)
            return tuple(map(change, outputs)) if fires() else outputs

        stage.wrap(lora, "lora_qkv_unchecked", project)

    return arm


def _rots(path: Path) -> Arm:
    """Break off the clip's file before step 3: it was read before."""

    def arm(stage: Stage) -> None:
        def cut() -> None:
            if stage.run.session.is_main:
                path.write_bytes(path.read_bytes()[:700])
            stage.run.accelerator.wait_for_everyone()

        stage.before_step(3, cut)

    return arm


def _rotten(fault: Fault, world: World) -> Observation:
    """Compare a run whose clip rots with one that leaves the same sample out at the same step."""
    folder = world.root / "rotten_clips"
    world.copy_data(folder)
    observation = world.observe(fault.name, _rots(folder / world.target_clip), clips=folder)
    loses_its_loss = losses(times(math.nan), target_rows, When("from", 3))
    without_clip = world.observe(f"{fault.name}, left out", loses_its_loss)
    if observation.error is None and not equal(observation.adapter, without_clip.adapter or {}):
        return replace(observation, error=CheckFailedError("not the run that left the sample out"))
    return observation


def _expert(part: str, key: str, need: str = "experts") -> Fault:
    """A part of the model gives NaN for one sample. The sample is named, though only the loss shows the NaN."""
    name, module = f"chat:NaN from the {part} for one sample", f"{{experts[{key}]}}"
    message_parts = ("first nan in the forward",)
    expected = Expected("data", "quarantine", message_parts, True, module, "without")
    return Fault(name, "op", "every time", expected, op_of_target(divided, module), needs=(need,))


def _refused(name: str, location: str, arm: Arm, *message_parts: str, need: str = "experts") -> Fault:
    """A fault that the checks before the run must refuse."""
    expected = Expected("refused", "refused", message_parts, exit_code=2)
    preflight = (("guard.preflight", "anew"),)
    return Fault(f"chat:{name}", location, "before the run", expected, arm, preflight, needs=(need,))


_UNLABELLED = Expected("labels", "quarantine", ("labels are -100",), names_target=True, same_as="without")
_VISION = Expected("unknown", "stop", ("first nan in the forward",), module="{experts[vision]}", exit_code=3)
_SCORES = Expected(
    "precision",
    "stop",
    ("finite in fp32", "first inf in the forward"),
    module="{vision_attention}",
    exit_code=3,
)
_ROTTEN = Expected("data", "quarantine", ("cannot be decoded",), names_target=True)
_WORD = "disc"  # is said of the target, and of clips beside it
_FUSED = "lora_linear"
_EXPERTS, _ATTENTION = ("experts",), ("vision_attention",)
_LORA = (*_EXPERTS, "trains_lora")
_ONE = (("train.batch_size", 1),)
FAULTS: tuple[Fault, ...] = (
    Fault("chat:no labels", "labels", "every time", _UNLABELLED, _no_labels, needs=_EXPERTS),
    Fault(
        "chat:no labels in all of a micro-batch",  # of one rank, where there are two
        "labels",
        "every time",
        _UNLABELLED,
        _no_labels,
        _ONE,
        needs=_EXPERTS,
    ),
    _expert("vision encoder", "vision"),
    _expert("Q-Former", "qformer", "queries"),
    _expert("projection", "projection"),
    _expert("language model's attention", "attention"),
    _expert("language model's MLP", "mlp"),
    _expert("output head", "head"),
    from_step(
        "chat:NaN from the vision encoder for all",
        "op",
        _VISION,
        partial(module_output, "{experts[vision]}", divided),
        needs=_EXPERTS,
    ),
    Fault(
        "chat:fp16 scores in the vision encoder's attention",
        "precision",
        "from step 3",
        _SCORES,
        _fp16_scores,
        BF16,
        needs=_ATTENTION,
    ),
    _refused(
        "autocast inside",
        "precision",
        _own_autocast,
        "one owner of autocast",
        "{vision_attention}",
        "runs under torch.float16",
        need="vision_attention",
    ),
    _refused(
        "half trainables in our run",
        "optimizer",
        _half_trainables,
        "trainable tensors are not fp32",
        "{attention}.{key}.{first}",
    ),
    _refused(
        "bad token id",
        "text",
        _new_token,
        f"02_blue_disc_right.mp4: '{_WORD}' is token",
        "has embeddings of tokens 0..",
    ),
    from_step(
        "chat:fused LoRA layers that give NaN",
        "kernel",
        Expected("kernel", "fallback", (_FUSED,), close_to="clean"),
        partial(_fused_lora, divided),
        needs=_LORA,
    ),
    Fault(
        "chat:fused LoRA layers that are wrong backward",
        "kernel",
        "before the run",
        Expected("kernel", "fallback", (_FUSED, "gradient"), close_to="clean"),
        _fused_lora(backward_of(times(0.8)), When("from", 0)),
        CHECKED,
        needs=_LORA,
    ),
    Fault("chat:a clip that rots", "media", "step 3", _ROTTEN, play=_rotten, needs=_EXPERTS),
)
