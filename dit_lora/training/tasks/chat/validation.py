"""Writes the chat model's answers to the validation prompts."""

import json
from pathlib import Path

from dit_lora.data.loading.training_set import TrainingData
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.video import ClipError
from dit_lora.environment.progress_bar import ProgressBar
from dit_lora.errors import DitLoraError
from dit_lora.families.chat_base import ChatCheckpoint
from dit_lora.files import write_atomically
from dit_lora.numerics.eval_mode import use_eval_mode
from dit_lora.training.task import Setup
from dit_lora.training.tasks.chat.answerer import ChatAnswerGenerator

ANSWERS = "answers.json"


def write_answers(setup: Setup[TrainingData, ChatCheckpoint], step: int) -> None:
    """Write samples/step_NNNNNN/answers.json with the model's answers to `validation.prompts`. Collective."""
    settings, accelerator = setup.recipe.validation, setup.accelerator
    # All ranks of a sharded model generate together, the same answer on each.
    if not settings.prompts or not (setup.session.is_main or setup.engine.collective_forward):
        return
    answerer = ChatAnswerGenerator(setup.checkpoint, setup.transformer, accelerator.device, setup.dtype)
    answers = []
    description, is_quiet = f"answering at step {step}", not setup.session.is_main
    bar = ProgressBar(settings.prompts, desc=description, unit="answer", leave=False, disable=is_quiet)
    with use_eval_mode(setup.model):
        for index, prompt in enumerate(bar):
            file = settings.media[index] if settings.media else None
            media = MediaFile(Path(file)) if file else None
            try:
                answer = answerer.answer_question(media, prompt, max_tokens=settings.max_answer_tokens)
            except ClipError as problem:
                raise DitLoraError(f"validation.media: {problem}") from problem
            answers.append({"prompt": prompt, "media": file, "answer": answer})
    if not setup.session.is_main:
        return
    folder = setup.session.dir / "samples" / f"step_{step:06d}"
    write_atomically(folder / ANSWERS, json.dumps(answers, indent=2, ensure_ascii=False) + "\n")
