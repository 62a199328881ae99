"""What a chat model makes of conversations that it is not trained on: their loss, and answers to read."""

import json
from pathlib import Path

import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from dit_lora.data.media import MediaFile
from dit_lora.data.training_set import Prepared
from dit_lora.data.video import ClipError
from dit_lora.errors import DitLoraError
from dit_lora.families.chat_base import ChatCheckpoint
from dit_lora.files import write_whole
from dit_lora.numerics.streams import Streams, fold
from dit_lora.training.chat.answering import Answerer
from dit_lora.training.chat.training_set import ChatSet
from dit_lora.training.modes import evaluating
from dit_lora.training.shared import agreed, of_any_rank, own_share
from dit_lora.training.task import Setup

ANSWERS = "answers.json"


def held_out_loss(setup: Setup[Prepared, ChatCheckpoint], clips: ChatSet) -> float | None:
    """Mean loss over the answer tokens of `validation.conversations`, up to `held_out_clips` of them. Collective.

    Frames are those in the middle, turns as written: the same at every call.
    """
    accelerator = setup.runtime.accelerator
    entries = clips.entries[: setup.recipe.validation.held_out_clips]
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # of losses, of tokens
    faults: dict[str, str] = {}
    with evaluating(setup.model):
        for entry in own_share(entries, accelerator, setup.transformer):
            sample = clips.sample(entry, 0)
            if of_any_rank(sample.faults, setup.transformer):
                faults |= sample.faults
                continue
            batch = sample.to(accelerator.device)
            streams = Streams(fold(setup.recipe.train.seed, "held_out"), batch.draws)
            losses = setup.checkpoint.losses(setup.transformer, batch.tensors, streams).losses
            sums += torch.stack(
                [losses.double().sum() * entry.answers, sums.new_tensor(entry.answers)]
            )
    for sample_id, fault in dict(gather_object(list(faults.items()))).items():
        setup.runtime.say(f"held-out loss leaves out {sample_id}: {fault}")
    total, count = accelerator.reduce(sums, reduction="sum").tolist()
    return total / count if count else None


def write_answers(setup: Setup[Prepared, ChatCheckpoint], step: int) -> None:
    """Write samples/step_NNNNNN/answers.json: what the model says to each of `validation.prompts`. Collective."""
    if not setup.recipe.validation.prompts:
        return
    # A sharded model answers on all ranks at once, the same on each.
    takes_part = setup.runtime.is_main or setup.engine.lockstep
    agreed(setup.runtime, (lambda: _write(setup, step)) if takes_part else None)


def _write(setup: Setup[Prepared, ChatCheckpoint], step: int) -> None:
    settings, accelerator = setup.recipe.validation, setup.runtime.accelerator
    answerer = Answerer(
        setup.checkpoint, setup.transformer, accelerator.device, setup.runtime.precision.dtype
    )
    answers = []
    bar = tqdm(
        settings.prompts,
        desc=f"answering at step {step}",
        unit="answer",
        leave=False,
        disable=not setup.runtime.is_main,
    )
    with evaluating(setup.model):
        for index, prompt in enumerate(bar):
            file = settings.media[index] if settings.media else None
            try:
                said = answerer.ask(
                    MediaFile(Path(file)) if file else None,
                    prompt,
                    max_tokens=settings.max_answer_tokens,
                )
            except ClipError as problem:
                raise DitLoraError(f"validation.media: {problem}") from problem
            answers.append({"prompt": prompt, "media": file, "answer": said})
    if not setup.runtime.is_main:
        return
    folder = setup.runtime.dir / "samples" / f"step_{step:06d}"
    write_whole(folder / ANSWERS, json.dumps(answers, indent=2, ensure_ascii=False) + "\n")
