"""A sample's page shows its frames and all its tokens, and trusts nothing it was given."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizers import llama_tokenizer
from html_page import Page
from PIL import Image

from dit_lora.data.chat.conversation import Conversation, ConversationKind, Turn
from dit_lora.data.chat.fitting import shorten_conversation
from dit_lora.data.chat.prompts import render_prompt
from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.errors import DitLoraError
from dit_lora.report.chat_sample_page import MAX_FRAMES, write_chat_sample_page

TOKENIZER = llama_tokenizer()
HOSTILE = '<script>alert("x")</script> & a cat'


def rendered(
    question: str = "What does the cat do?", less: int = 0, kind: ConversationKind = "video"
) -> RenderedConversation:
    conversation = Conversation("a", kind, None, (Turn(question, "It sleeps on the warm sofa."),))
    full = render_prompt("mistral", conversation, TOKENIZER, 10**6, 96, [0.5])
    return shorten_conversation(full, len(full) - less)


def frames(count: int, height: int = 30, width: int = 50) -> torch.Tensor:
    """Each in another grey."""
    levels = torch.arange(count, dtype=torch.uint8).view(count, 1, 1, 1) * 5
    return levels.expand(count, 3, height, width)


def write(folder: Path, one: RenderedConversation, **more: Any) -> Page:
    path = folder / "sample.html"
    page_values: dict[str, Any] = {"kind": "video", **more}
    name = page_values.pop("sample", "clips/cat.mp4")
    assert write_chat_sample_page(path, name, one, TOKENIZER, **page_values) == path
    return Page(path)


def classes(page: Page) -> list[str]:
    return [a["class"] or "" for a in page.all("div") if (a.get("class") or "").startswith("piece ")]


def test_the_page_shows_every_token_with_what_becomes_of_it(tmp_path: Path) -> None:
    sample = rendered()
    page = write(tmp_path, sample, frames=frames(1), seconds=[0.5])
    names = {"answer": "learned"}
    assert classes(page) == [f"piece {names.get(p.part, p.part)}" for p in sample.pieces]
    titles = [a["title"] for a in page.all("span") if a.get("title")]
    ids = [(token, position) for position, token in enumerate(sample.ids) if token != 10**6]
    assert titles == [f"token {token} at {position}" for token, position in ids]
    assert "96 media tokens" in page.text
    assert "left out" not in page.text
    assert f"learned {sample.num_answer_tokens} answers and their end tokens" in page.text


def test_frames_are_small_pictures_with_their_seconds(tmp_path: Path) -> None:
    shape = {"height": 300, "width": 500}
    page = write(tmp_path, rendered(), frames=frames(3, **shape), seconds=[0.5, 1.25, 7.0])
    sources = [(a["src"] or "") for a in page.all("img")]
    assert len(sources) == 3
    for index, source in enumerate(sources):
        data = base64.b64decode(source.removeprefix("data:image/jpeg;base64,"))
        picture = Image.open(io.BytesIO(data))
        assert picture.size == (240, 144)
        assert abs(picture.getpixel((9, 9))[0] - 5 * index) <= 1  # type: ignore[index,operator]
    assert re.findall(r"\d+\.\d\d s", page.section("Frames")) == ["0.50 s", "1.25 s", "7.00 s"]
    assert "500 x 300 pixels" in page.text


def test_of_many_frames_evenly_spread_ones_are_shown(tmp_path: Path) -> None:
    num_frames = MAX_FRAMES + 9
    page = write(tmp_path, rendered(), frames=frames(num_frames), seconds=list(range(num_frames)))
    assert len(page.all("img")) == MAX_FRAMES
    assert f"{MAX_FRAMES} of {num_frames} frames are shown" in page.text
    times = re.findall(r"(\d+)\.00 s", page.section("Frames"))
    assert times[0] == "0"
    assert times[-1] == str(num_frames - 1)


def test_what_was_left_out_is_said_and_marked(tmp_path: Path) -> None:
    sample = rendered("What does the cat do in the picture with the man? " * 3, less=17)
    page = write(tmp_path, sample, frames=frames(1), seconds=[0.5])
    assert "17 tokens of the questions were left out" in page.text
    assert "17 tokens left out" in page.section("Tokens in order")


def test_text_from_the_data_is_escaped_and_nothing_is_fetched(tmp_path: Path) -> None:
    sample = rendered(HOSTILE)
    hostile_values = {"sample": HOSTILE, "instruction": HOSTILE}
    page = write(tmp_path, sample, frames=frames(1), seconds=[0.5], **hostile_values)
    assert page.all("script") == []
    assert page.text.count('alert("x")') >= 3
    links = [a[key] for key in ("src", "href") for _, a in page.tags if a.get(key)]
    assert all((link or "").startswith("data:") for link in links)
    assert "default-src 'none'" in page.source


@pytest.mark.parametrize("kind", ["text", "image"])
def test_samples_without_seconds(tmp_path: Path, kind: ConversationKind) -> None:
    media_frames = None if kind == "text" else frames(1)
    page = write(tmp_path, rendered(kind=kind), kind=kind, frames=media_frames)
    assert ("the sample's kind is text" in page.text) == (kind == "text")
    assert len(page.all("img")) == (kind == "image")
    assert page.all("figcaption") == []


def test_a_page_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "sample.html").mkdir()
    with pytest.raises(DitLoraError, match="cannot write"):
        write(tmp_path, rendered(), frames=frames(1))
