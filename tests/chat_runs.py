"""Data for chat recipes that run in tests, what they leave, and the questions that they learn by heart."""

import json
import shutil
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from launching import ROOT
from peft import PeftModel
from safetensors.torch import load_file

from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.chat.frames import read_frames_at, sample_frame_times
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.video import read_header, write_sample
from dit_lora.data.synthetic.clips import COLOURS
from dit_lora.data.synthetic.conversations import write_conversations
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.training.tasks.chat.answerer import ChatAnswerGenerator

Main = Callable[[list[str]], None]
CLIPS = (
    "clips/00_red_disc_right.mp4",
    "clips/01_green_disc_left.mp4",
    "clips/02_blue_disc_right.mp4",
)
QA = {
    "dirt_road": "A car on a dirt road.",
    "hiker": "A hiker at sunset.",
    "horse": "A horse and its rider.",
    "kitten": "A kitten on the lawn.",
    "making_cake": "Somebody makes a cake.",
    "playing_guitar": "A hand on a guitar.",
    "toy_ship": "A wooden toy ship.",
}
_SHOWN = "What is shown?"


def smokes() -> dict[str, Path]:
    """Smoke recipes of chat families, by name."""
    paths = sorted((ROOT / "recipes" / "smoke").glob("*.yaml"))
    return {path.stem: path for path in paths if load_recipe(path).model.family in CHAT_FAMILIES}


def common(name: str, base: Path, data: Path, tmp_path: Path) -> list[str]:
    """A smoke recipe with overrides that make it quick: no answers, no held-out loss."""
    return [
        str(smokes()[name]),
        f"model.path={base}",
        f"data.path={data / 'conversations.json'}",
        f"data.cache={tmp_path / 'cache'}",
        "validation.prompts=[]",
        "validation.media=[]",
    ]


def write_data(folder: Path) -> Path:
    """Clips, images, and conversations about them and about nothing; some held out."""
    path = write_conversations(folder, clips=4, images=2, frames=6, height=48, width=64, fps=8)
    records = json.loads(path.read_text())
    held_out = [{"messages": _messages(f"What is {n} and one?", f"{n + 1}.")} for n in range(4)]
    (folder / "held_out.json").write_text(json.dumps([records[3], records[4], held_out[3]]))
    path.write_text(json.dumps([*records, *held_out[:3]]))
    return folder


def _messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def without_dropout(base: Path, out: Path) -> Path:
    """A copy of a tiny VideoChat2 whose Q-Former and encoder draw nothing, so that ranks cannot draw differently."""
    shutil.copytree(base, out)
    config = json.loads((out / "config.json").read_text())
    config["qformer_config"] |= {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
    }
    config["vision_config"] |= {"drop_path_rate": 0.0}
    (out / "config.json").write_text(json.dumps(config))
    return out


def state(run: Path, step: int) -> dict[str, bytes]:
    """Weights and optimizer of a checkpoint."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    names = ("trainable.safetensors", "optimizer.safetensors")
    return {name: (folder / name).read_bytes() for name in names}


def write_band_questions(folder: Path) -> None:
    """One question about eight clips, and eight answers: which colour a band has, and where it is."""
    colours = {**COLOURS, "white": (235, 235, 235)}
    records = []
    for number, (position, colour) in enumerate(product(("top", "bottom"), colours)):
        video = torch.full((6, 48, 64, 3), 30, dtype=torch.uint8)
        rows = slice(0, 20) if position == "top" else slice(28, 48)
        video[:, rows] = torch.tensor(colours[colour], dtype=torch.uint8)
        path = write_sample(folder / str(number), video, 4.0)
        turn = {"q": _SHOWN, "a": f"A {colour} band at the {position}."}
        records.append({"video": path.name, "QA": [turn]})
    _write_questions(folder, records)


def write_small_clips(clips: Path, folder: Path, answers: Mapping[str, str]) -> None:
    """Copies of 64x64 that all last as long, so that no time in the prompt gives one away; and their questions."""
    for name in answers:
        media = MediaFile(clips / f"{name}.mp4")
        header = read_header(media)
        assert header.seconds is not None
        assert header.fps is not None
        seconds = sample_frame_times(header.seconds, header.fps, 8)
        frames = read_frames_at(media, seconds, height=64, width=64, fit="stretch")
        write_sample(folder / name, frames.permute(0, 2, 3, 1), 2.0)
    records = [{"video": f"{n}.mp4", "QA": [{"q": _SHOWN, "a": a}]} for n, a in answers.items()]
    bad_question = {"q": "Is it in colour?", "a": "No, black and white."}
    _write_questions(folder, [*records, {"video": "horse.mp4", "QA": [bad_question]}])


def _write_questions(folder: Path, records: list[dict[str, Any]]) -> None:
    (folder / "qa.json").write_text(json.dumps(records))


def answers_of(answerer: ChatAnswerGenerator, folder: Path, records: list[dict[str, Any]]) -> list[str]:
    """What it says to each question of the records."""
    return [
        answerer.answer_question(MediaFile(folder / record["video"]), turn["q"], max_tokens=40)
        for record in records
        for turn in record["QA"]
    ]


def with_peft(run: Path) -> ChatAnswerGenerator:
    """The run's result by the stock model, its base weights by hand, and `PeftModel.from_pretrained`."""
    recipe = load_recipe(run / "config.yaml")
    config = ModelConfig(family=recipe.model.family, path=recipe.model.path)
    checkpoint = get_family(config.family).open(config, recipe)
    model = checkpoint.model_class.from_pretrained(checkpoint.path)
    weights = load_file(run / "adapter" / "base_weights.safetensors")
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    tuned = PeftModel.from_pretrained(model, run / "adapter").eval()
    return ChatAnswerGenerator(checkpoint, tuned, torch.device("cpu"), torch.float32)
