"""Faults of a chat model's steps: answers without a label, experts that fail, precision, clips that rot."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dit_lora.data.loading.batch import Batch
from dit_lora.errors import CheckFailedError
from dit_lora.faults.fault import Expected, Fault, equal
from dit_lora.faults.ops import BF16, CHECKED, divided, op_of_target
from dit_lora.faults.world import Arm, Observation, Stage, World
from dit_lora.fuse import lora
from dit_lora.numerics.labels import IGNORE
from dit_lora.numerics.objectives import LossOutput
from dit_lora.training.tasks.chat.training_set import ChatEntry, ChatSet


def _no_labels(stage: Stage) -> None:
    """Cut answers on the right, as VideoChat2 does, which takes a long sample's whole answer (N12)."""
    read = ChatSet._read

    def cut(clips: ChatSet, entry: ChatEntry, *args: Any) -> Batch:
        batch = read(clips, entry, *args)
        if entry.id != stage.target:
            return batch
        labels = torch.full_like(batch.tensors["labels"], IGNORE)
        return replace(batch, tensors={**batch.tensors, "labels": labels})

    stage.patch(ChatSet, "_read", cut)


def _fails_for_all(stage: Stage) -> None:
    """Let the vision encoder give NaN from step 3 on, whatever it is shown."""
    state = {"armed": False}
    stage.before_step(3, lambda: state.update(armed=True))

    def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return divided(output) if state["armed"] else output

    vision = stage.site.experts["vision"]
    stage.transformer.get_submodule(vision).register_forward_hook(hook)


def _fp16_scores(stage: Stage) -> None:
    """Compute the vision encoder's attention as the original does: q @ k in fp16, norms of 300, then softmax (N4)."""
    assert stage.site.vision_attention is not None
    module = stage.transformer.get_submodule(stage.site.vision_attention)
    right, state = F.scaled_dot_product_attention, {"armed": False, "inside": False}
    stage.before_step(3, lambda: state.update(armed=True))
    module.register_forward_pre_hook(lambda *_: state.update(inside=True))
    module.register_forward_hook(lambda *_: state.update(inside=False))

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not (state["armed"] and state["inside"]):
            return right(*args, **kwargs)
        query, key, value = args
        dtype = torch.float32 if query.dtype is torch.float32 else torch.float16
        long_query, long_key = (
            300 * F.normalize(states.to(dtype), dim=-1) for states in (query, key)
        )
        # One direction that all share, as trained queries and keys have.
        scores = long_query.abs() @ long_key.abs().mT
        return scores.softmax(-1).to(value.dtype) @ value

    stage.patch(F, "scaled_dot_product_attention", attention)


def _own_autocast(stage: Stage) -> None:
    """Open fp16 in a part of the model whatever the recipe says, as `maybe_autocast` of the original does (N15)."""
    part = stage.transformer.get_submodule(stage.site.vision_attention or "")
    inner = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(stage.run.setup.session.accelerator.device.type, dtype=torch.float16):
            return inner(*args, **kwargs)

    stage.patch(part, "forward", forward)


def _half_trainables(stage: Stage) -> None:
    """Halve the model after PEFT's attach, which is fp32 here whatever the base is (N13)."""
    wide = {parameter.dtype for parameter in stage.trained().values()}
    if wide != {torch.float32}:
        raise CheckFailedError(f"attached in {wide}, not in fp32")
    for parameter in stage.trained().values():
        parameter.data = parameter.data.half()


def _new_token(stage: Stage) -> None:
    """Teach the tokenizer a word that the model has not learned: an index beyond the table of embeddings."""
    stage.checkpoint.tokenizer.add_tokens([_WORD])


def _wrong_lora(change: Callable[[torch.Tensor], torch.Tensor], *, from_step: int) -> Arm:
    """Let the fused LoRA layer go wrong; PEFT's own is right."""

    def arm(stage: Stage) -> None:
        right, state = lora.lora_qkv, {"armed": from_step == 0}
        if from_step:
            stage.before_step(from_step, lambda: state.update(armed=True))

        def wrong(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            outputs = right(*args, **kwargs)
            return tuple(map(change, outputs)) if state["armed"] else outputs

        stage.patch(lora, "lora_qkv", wrong)

    return arm


def _lossy(output: torch.Tensor) -> torch.Tensor:
    """Leave the forward right, and lose a fifth of the gradient backward."""
    if output.requires_grad:
        output.register_hook(lambda grad: grad * 0.8)
    return output


def _rots(path: Path) -> Arm:
    """Break off the clip's file before step 3: it was read before."""

    def arm(stage: Stage) -> None:
        def cut() -> None:
            if stage.run.setup.session.is_main:
                path.write_bytes(path.read_bytes()[:700])
            stage.run.setup.session.accelerator.wait_for_everyone()

        stage.before_step(3, cut)

    return arm


def _loses_its_loss(stage: Stage) -> None:
    """Make the target's loss NaN from step 3 on: the run that one without the rotten clip is compared with."""
    state = {"armed": False}
    stage.before_step(3, lambda: state.update(armed=True))

    def change(output: LossOutput, batch: Any, streams: Any) -> LossOutput:
        rows = torch.tensor(stage.is_target(batch)) & state["armed"]
        return LossOutput(output.losses.masked_fill(rows, torch.nan), output.timesteps)

    stage.checkpoint.after.append(change)


def _rotten(fault: Fault, world: World) -> Observation:
    """Compare a run whose clip rots with one that leaves the same sample out at the same step."""
    folder = world.root / "rotten_clips"
    world.copy_data(folder)
    seen = world.observe(fault.name, _rots(folder / world.target), clips=folder)
    other = world.observe(f"{fault.name}, left out", _loses_its_loss)
    if seen.error is None and not equal(seen.adapter, other.adapter or {}):
        return replace(seen, error=CheckFailedError("not the run that left the sample out"))
    return seen


def _expert(what: str, key: str) -> Fault:
    """Return the fault of a part of the model that gives NaN for one sample: named, though only the loss shows it."""

    def arm(stage: Stage) -> None:
        op_of_target(divided, stage.site.experts[key])(stage)

    return Fault(
        f"chat:NaN from the {what} for one sample",
        "op",
        "every time",
        replace(_OP, module=f"{{experts[{key}]}}"),
        arm,
        needs=("queries",) if key == "qformer" else ("experts",),
    )


_OP = Expected("data", "quarantine", ("first nan in the forward",), True, None, "without")
_UNLABELLED = Expected(
    "labels", "quarantine", ("labels are -100",), names_target=True, same_as="without"
)
_WORD = "disc"  # is said of the target, and of clips beside it
_FUSED = ("lora_linear",)
FAULTS: tuple[Fault, ...] = (
    Fault(
        "chat:no labels",
        "labels",
        "every time",
        _UNLABELLED,
        _no_labels,
        needs=("experts",),
    ),
    Fault(
        "chat:no labels in all of a micro-batch",  # of one rank, where there are two
        "labels",
        "every time",
        _UNLABELLED,
        _no_labels,
        (("train.batch_size", 1),),
        needs=("experts",),
    ),
    _expert("vision encoder", "vision"),
    _expert("Q-Former", "qformer"),
    _expert("projection", "projection"),
    _expert("language model's attention", "attention"),
    _expert("language model's MLP", "mlp"),
    _expert("output head", "head"),
    Fault(
        "chat:NaN from the vision encoder for all",
        "op",
        "from step 3",
        Expected(
            "unknown",
            "stop",
            ("first nan in the forward",),
            module="{experts[vision]}",
            exit_code=3,
        ),
        _fails_for_all,
        needs=("experts",),
    ),
    Fault(
        "chat:fp16 scores in the vision encoder's attention",
        "precision",
        "from step 3",
        Expected(
            "precision",
            "stop",
            ("finite in fp32", "first inf in the forward"),
            module="{vision_attention}",
            exit_code=3,
        ),
        _fp16_scores,
        BF16,
        needs=("vision_attention",),
    ),
    Fault(
        "chat:autocast inside",
        "precision",
        "before the run",
        Expected(
            "refused",
            "refused",
            ("one owner of autocast", "{vision_attention}", "runs under torch.float16"),
            exit_code=2,
        ),
        _own_autocast,
        (("guard.preflight", True),),
        needs=("vision_attention",),
    ),
    Fault(
        "chat:half trainables in our run",
        "optimizer",
        "before the run",
        Expected(
            "refused",
            "refused",
            ("trainable tensors are not fp32", "{attention}.{key}.lora_A.default.weight"),
            exit_code=2,
        ),
        _half_trainables,
        (("guard.preflight", True),),
        needs=("experts",),
    ),
    Fault(
        "chat:bad token id",
        "text",
        "before the run",
        Expected(
            "refused",
            "refused",
            (f"02_blue_disc_right.mp4: '{_WORD}' is token", "has embeddings of tokens 0.."),
            exit_code=2,
        ),
        _new_token,
        (("guard.preflight", True),),
        needs=("experts",),
    ),
    Fault(
        "chat:fused LoRA layers that give NaN",
        "kernel",
        "from step 3",
        Expected("kernel", "fallback", _FUSED, close_to="clean"),
        _wrong_lora(divided, from_step=3),
        needs=("experts",),
    ),
    Fault(
        "chat:fused LoRA layers that are wrong backward",
        "kernel",
        "before the run",
        Expected("kernel", "fallback", (*_FUSED, "gradient"), close_to="clean"),
        _wrong_lora(_lossy, from_step=0),
        CHECKED,
        needs=("experts",),
    ),
    Fault(
        "chat:a clip that rots",
        "media",
        "step 3",
        Expected("data", "quarantine", ("cannot be decoded",), names_target=True),
        play=_rotten,
        needs=("experts",),
    ),
)
