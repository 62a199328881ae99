"""Conversations are rendered once for their lengths: no training draw is longer, and those too long are named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from chat_sets import found_in, recipe_of, records, set_of, turns, write_records
from family_cases.chat import FAMILY_OF, SIDES

from dit_lora.config.load import parse_recipe
from dit_lora.data.synthetic.conversations import write_conversations
from dit_lora.training.tasks.chat.samples import compute_digest
from dit_lora.training.tasks.chat.training_set import make_sample_generator


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media") / "data"
    write_conversations(folder, clips=2, images=2, frames=6, height=48, width=64, fps=8)
    return folder


@pytest.fixture
def tiny(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["videochat2-mistral"]


def test_each_sample_has_its_kind_its_pixels_and_its_length(media: Path, tiny: Path, tmp_path: Path) -> None:
    clips = set_of(recipe_of(tiny, write_records(media, records()), tmp_path))
    shapes = {entry.id: entry.shape for entry in clips.entries}
    assert [shape.kind for shape in shapes.values()] == ["video"] * 2 + ["image"] * 2 + ["text"] * 2
    assert {(s.kind, s.frames, s.height, s.width) for s in shapes.values()} == {
        ("video", 4, 32, 32),
        ("image", 1, 32, 32),
        ("text", 0, 0, 0),
    }
    for entry in clips.entries:
        rendered, _ = clips.render(entry, None)
        assert len(rendered) <= entry.shape.length < len(rendered) + 2 * 32
        assert entry.shape.length % 32 == 0
        assert entry.answers == rendered.num_answer_tokens


@pytest.mark.parametrize("variant", FAMILY_OF)
def test_no_draw_is_longer_than_its_bucket_nor_has_other_answers(
    variant: str, media: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Frames and order of turns by chance: lengths to the token, of what the Q-Former reads too."""
    recipe = recipe_of(
        tiny_checkpoints[variant],
        write_records(media, records()),
        tmp_path,
        family=FAMILY_OF[variant],
        length_step=1,
        max_tokens=1024,
    )
    side = SIDES[variant]
    data = recipe.data.model_copy(update={"height": side, "width": side})
    clips = set_of(recipe.model_copy(update={"data": data}))
    orders_by_id: dict[str, set[tuple[int, int]]] = {}
    for entry in clips.entries:
        for draw in range(12):
            rendered, _ = clips.render(entry, make_sample_generator(1, draw))
            assert rendered.num_answer_tokens == entry.answers
            assert len(rendered) <= entry.shape.length
            assert len(rendered.instruction) <= entry.num_instruction_tokens
            orders_by_id.setdefault(entry.id, set()).add((len(rendered), len(rendered.instruction)))
        lengths, counts = zip(*orders_by_id[entry.id], strict=True)
        assert max(lengths) == entry.shape.length
        assert max(counts) == entry.num_instruction_tokens
    if variant.startswith("videochat2"):
        assert len(orders_by_id[clips.entries[0].id]) > 1  # another instruction first, another length


def test_questions_that_are_too_long_are_shortened_and_answers_are_not(
    media: Path, tiny: Path, tmp_path: Path
) -> None:
    long = {"QA": [{"q": "which " * 200 + "way?", "a": "To the right."}]}
    path = write_records(media, [{"video": "clips/00_red_disc_right.mp4", **long}])
    clips = set_of(recipe_of(tiny, path, tmp_path, max_tokens=100))
    (entry,) = clips.entries
    assert entry.num_dropped_tokens > 100
    rendered, _ = clips.render(entry, None)
    assert len(rendered) == 100
    text = clips.checkpoint.tokenizer.decode(rendered.ids)
    assert "To the right. </s>" in text
    assert "way?" in text
    assert entry.shape.length == 128


def test_what_cannot_be_used_is_named_with_its_reason(media: Path, tiny: Path, tmp_path: Path) -> None:
    cut = media / "clips" / "cut.mp4"
    clip_bytes = (media / "clips" / "00_red_disc_right.mp4").read_bytes()
    cut.write_bytes(clip_bytes[: len(clip_bytes) // 3])
    questions = [{"q": "What?", "a": "It."}]
    path = write_records(
        media,
        [
            *records(),
            {"video": "clips/cut.mp4", "QA": questions},
            {"video": "clips/gone.mp4", "QA": questions},
            {"video": "clips/00_red_disc_right.mp4", "QA": [{"q": "What?", "a": "long " * 300}]},
            {"video": "clips/01_green_disc_left.mp4", "QA": questions, "start": 50, "end": 60},
        ],
    )
    _, found_records = found_in(recipe_of(tiny, path, tmp_path))
    cut.unlink()
    assert len(found_records.entries) == 6
    assert set(found_records.rejected) == {
        "clips/cut.mp4",
        "clips/gone.mp4",
        "clips/00_red_disc_right.mp4#2",
        "clips/01_green_disc_left.mp4#2",
    }
    reasons = found_records.rejected
    assert "no such file" in reasons["clips/gone.mp4"]
    assert "chat.max_tokens is 256" in reasons["clips/00_red_disc_right.mp4#2"]
    assert "nothing lies between 50 s" in reasons["clips/01_green_disc_left.mp4#2"]
    assert set(found_records.names) == {entry.id for entry in found_records.entries} | set(reasons)
    assert len(found_records.media) == 4 + 3  # that were there, the broken one among them


def test_the_recipes_system_text_is_that_of_samples_without_their_own(media: Path, tiny: Path, tmp_path: Path) -> None:
    own_system = {"system": "Be rude.", "messages": turns("What?", "This.")}
    path = write_records(media, [own_system, {"messages": turns("What is it?", "Nothing.")}])
    clips = set_of(recipe_of(tiny, path, tmp_path, system="Be brief."))
    texts = [clips.checkpoint.tokenizer.decode(clips.render(e, None)[0].ids) for e in clips.entries]
    assert ["Be rude." in text for text in texts] == [True, False]
    assert ["Be brief." in text for text in texts] == [False, True]


@pytest.mark.parametrize("change", ["answer", "question", "instruction", "file", "frames", "weight"])
def test_the_digest_changes_with_all_that_is_trained_on(change: str, media: Path, tiny: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(media, tmp_path / "data"))
    raw_records = records()[:2]
    recipe = recipe_of(tiny, write_records(data, raw_records), tmp_path)
    entries = found_in(recipe)[1].entries
    before = compute_digest(entries)
    assert compute_digest(entries[1:]) != before  # one is left out
    assert compute_digest(found_in(recipe)[1].entries) == before
    turn = raw_records[0]["QA"][0]
    if change in ("answer", "question", "instruction"):
        turn[{"answer": "a", "question": "q", "instruction": "i"}[change]] += " Yes."
        write_records(data, raw_records)
    elif change == "file":
        clip_path, other_path = data / raw_records[0]["video"], data / "images" / ".."
        write_conversations(other_path / "more", clips=1, images=0, frames=9, height=64, width=96, fps=8)
        shutil.copy(next((other_path / "more" / "clips").glob("*.mp4")), clip_path)
    elif change == "frames":
        update = {"data": recipe.data.model_copy(update={"frames": 3})}
        recipe = recipe.model_copy(update=update)
    else:
        values = json.loads(recipe.model_dump_json())
        source = {"path": values["data"].pop("path"), "loss_weight": 0.5}
        recipe = parse_recipe({**values, "data": {**values["data"], "path": None, "sources": [source]}}, "test")
    assert compute_digest(found_in(recipe)[1].entries) != before


def test_turns_are_shuffled_where_they_are_independent_and_nowhere_else(
    media: Path, tiny: Path, tmp_path: Path
) -> None:
    """Messages follow one another; only lists of questions are shuffled."""
    raw_records: list[Any] = [
        {"video": "clips/00_red_disc_right.mp4", "messages": turns("One?", "1", "Two?", "2")},
        {"video": "clips/01_green_disc_left.mp4", "QA": [{"q": q, "a": q} for q in "abc"]},
    ]
    path = write_records(media, raw_records)

    def orders(**chat: Any) -> list[set[str]]:
        clips = set_of(recipe_of(tiny, path, tmp_path, timestamps=False, **chat))
        decode = clips.checkpoint.tokenizer.decode
        skip = clips.checkpoint.config.media_token_id  # type: ignore[attr-defined]
        return [
            {
                decode([i for i in clips.render(entry, make_sample_generator(0, draw))[0].ids if i != skip])
                for draw in range(20)
            }
            for entry in clips.entries
        ]

    assert [len(order) for order in orders()] == [1, 6]
    assert [len(order) for order in orders(shuffle_turns=False)] == [1, 1]
