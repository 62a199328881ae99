"""The data set of shapes says what its files show."""

import json

import pytest
import torch

from dit_lora.config.recipe import DataConfig
from dit_lora.data.chat.annotations import read_conversations
from dit_lora.data.chat.conversation import Conversation
from dit_lora.data.chat.frames import read_frames_at, sample_frame_times
from dit_lora.data.media.video import read_header
from dit_lora.data.synthetic.clips import COLOURS
from dit_lora.data.synthetic.conversations import write_conversations

HEIGHT, WIDTH, FRAMES = 34, 50, 6


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> list[Conversation]:
    path = write_conversations(
        tmp_path_factory.mktemp("chat"),
        clips=12,
        images=4,
        frames=FRAMES,
        height=HEIGHT,
        width=WIDTH,
        fps=8,
    )
    assert all(set(record) == {next(iter(record)), "QA"} for record in json.loads(path.read_text()))
    read_result = read_conversations(DataConfig(path=str(path), frames=FRAMES, height=32, width=48))
    assert not read_result.problems
    return read_result.usable


def pixels(one: Conversation) -> torch.Tensor:
    assert one.media is not None
    header = read_header(one.media)
    times: tuple[float, ...] = ()
    if header.seconds and header.fps:
        assert header.frames == FRAMES
        times = sample_frame_times(header.seconds, header.fps, FRAMES)
    return read_frames_at(one.media, times, height=HEIGHT, width=WIDTH, fit="stretch")


def shown(video: torch.Tensor) -> tuple[str, str, float]:
    """Colour, shape, and how far to the right its middle moves, in pixels."""
    bright = video.float().amax(1) > 90  # (F, H, W)
    colour = video[0][:, bright[0]].float().median(dim=1).values
    nearest = min(COLOURS, key=lambda name: float((colour - torch.tensor(COLOURS[name])).norm()))
    columns = torch.arange(WIDTH)
    middles = [float((frame * columns).sum() / frame.sum()) for frame in bright]
    rows = bright[0].sum(1)
    fill_ratio = float(rows[rows > 0].float().mean() / rows.max())  # a disc's rows differ, pi / 4
    return nearest, "square" if fill_ratio > 0.9 else "disc", middles[-1] - middles[0]


def test_answers_are_what_is_seen(conversations: list[Conversation]) -> None:
    clips = [conversation for conversation in conversations if conversation.kind == "video"]
    assert len(clips) == 12
    variants = set()
    for clip in clips:
        colour, shape, distance = shown(pixels(clip))
        answers = {turn.question: turn.answer for turn in clip.turns}
        side = "right" if distance > 0 else "left"
        assert abs(distance) > WIDTH / 4
        assert answers == {
            "Which way does it move?": f"To the {side}.",
            "What colour is the shape?": f"{colour.title()}.",
            "What shape is it?": f"A {shape}.",
        }
        assert {turn.instruction for turn in clip.turns} == {"Watch the video and answer the question."}
        variants.add((colour, shape, side))
    assert len(variants) == 12


def test_images_have_questions_or_a_caption(conversations: list[Conversation]) -> None:
    images = [conversation for conversation in conversations if conversation.kind == "image"]
    assert [len(conversation.turns) for conversation in images] == [2, 1, 2, 1]
    for sample in images:
        colour, shape, _ = shown(pixels(sample))
        last_turn = sample.turns[-1]
        assert shape in last_turn.answer
        if len(sample.turns) == 1:
            side = "left" if _is_left(pixels(sample)) else "right"
            assert last_turn.question == last_turn.instruction == ""
            assert last_turn.answer == f"A {colour} {shape} at the {side} of a dark background."


def _is_left(picture: torch.Tensor) -> bool:
    bright = picture[0].float().amax(0) > 90
    return bool(bright[:, : WIDTH // 2].sum() > bright[:, WIDTH // 2 :].sum())
