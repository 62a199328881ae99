"""What a run makes of conversations that it is not trained on: the mean over their tokens, and answers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from chat_sets import recipe_of, records, set_of, write_records

from dit_lora.config.validation import ValidationConfig
from dit_lora.data.chat.rendered import IGNORE_INDEX
from dit_lora.data.synthetic.conversations import write_conversations
from dit_lora.errors import DitLoraError
from dit_lora.families.chat_base import VisionSettings
from dit_lora.training.tasks.chat.answerer import load_answerer
from dit_lora.training.tasks.chat.task import ChatTask
from dit_lora.training.tasks.chat.validation import write_answers


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media") / "data"
    write_conversations(folder, clips=2, images=2, frames=6, height=48, width=64, fps=8)
    return folder


@pytest.fixture
def run(tiny_checkpoints: dict[str, Path], media: Path, tmp_path: Path) -> Any:
    """The attributes that validation needs, with the model of the checkpoint."""
    base = tiny_checkpoints["videochat2-mistral"]
    recipe = recipe_of(base, write_records(media, records()), tmp_path)
    clips = set_of(recipe)
    model = clips.checkpoint.load_model(torch.float32).eval()
    messages: list[str] = []
    session = SimpleNamespace(
        accelerator=Accelerator(cpu=True),
        say=messages.append,
        is_main=True,
        dir=tmp_path / "run",
        said=messages,
    )
    return SimpleNamespace(
        session=session,
        accelerator=session.accelerator,
        recipe=recipe,
        checkpoint=clips.checkpoint,
        model=model,
        transformer=model,
        dtype=torch.float32,
        clips=clips,
        data=SimpleNamespace(eval_set=clips),
    )


def validating(run: Any, **values: Any) -> Any:
    update = {"validation": ValidationConfig(**values)}
    run.recipe = run.recipe.model_copy(update=update)
    return run


def test_the_eval_loss_is_the_mean_over_answer_tokens(run: Any) -> None:
    """Computed with the stock model, one sample at a time."""
    total, count = 0.0, 0
    for entry in run.clips.entries:
        tensors = run.clips.read_sample(entry, 0).tensors
        with torch.no_grad():
            logits = run.model(**run.checkpoint.build_model_inputs(tensors)).logits[0].double()
        labels, positions = tensors["labels"][0], tensors["answer_positions"][0]
        learned = labels != IGNORE_INDEX
        log_probs = torch.log_softmax(logits[positions[learned]], -1)
        total -= log_probs.gather(1, labels[learned][:, None]).sum().item()
        count += int(learned.sum())
    loss = ChatTask().compute_eval_loss(validating(run, eval_clips=99))
    assert loss == pytest.approx(total / count, rel=1e-5)
    assert ChatTask().compute_eval_loss(run) == loss
    (first_entry, *_) = run.clips.entries
    single_clip_loss = ChatTask().compute_eval_loss(validating(run, eval_clips=1))
    assert single_clip_loss is not None
    assert single_clip_loss != pytest.approx(loss)
    assert first_entry.answers < count


def test_a_clip_that_broke_is_left_out_of_it_and_said(run: Any, media: Path) -> None:
    expected_loss = ChatTask().compute_eval_loss(validating(run, eval_clips=99))
    clip = media / run.clips.entries[0].id
    data = clip.read_bytes()
    clip.write_bytes(data[: len(data) // 2])
    actual_loss = ChatTask().compute_eval_loss(run)
    clip.write_bytes(data)
    assert actual_loss != expected_loss
    (message,) = run.session.said
    assert message.startswith(f"eval loss: skipped {run.clips.entries[0].id}: ")


def test_answers_are_what_the_model_says_when_asked(run: Any, media: Path) -> None:
    clip = str(media / "clips" / "00_red_disc_right.mp4")
    prompts = ("What is it?", "Why?")
    write_answers(validating(run, prompts=prompts, media=(clip, clip), max_answer_tokens=5), 7)
    written = json.loads((run.session.dir / "samples" / "step_000007" / "answers.json").read_text())
    answering = load_answerer(run.checkpoint.path)
    # The recipe says at which seconds the frames are; the checkpoint was trained without.
    answering.checkpoint = answering.checkpoint.copy_with_vision_settings(VisionSettings.from_recipe(run.recipe))
    from dit_lora.data.media.media import MediaFile

    expected = [answering.answer_question(MediaFile(Path(clip)), prompt, max_tokens=5) for prompt in prompts]
    assert [row["answer"] for row in written] == expected
    assert [(row["prompt"], row["media"]) for row in written] == [(p, clip) for p in prompts]


def test_without_prompts_nothing_is_written_and_a_lost_clip_is_named(run: Any) -> None:
    write_answers(validating(run), 7)
    assert not run.session.dir.exists()
    lost = validating(run, prompts=("What?",), media=("lost.mp4",))
    with pytest.raises(DitLoraError, match=r"validation\.media: .*lost\.mp4"):
        write_answers(lost, 7)
