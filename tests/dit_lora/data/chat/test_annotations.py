"""Annotation files of several formats, one list of conversations; every offender at once, by its code."""

import json
from pathlib import Path
from typing import Any

import pytest

from dit_lora.config.recipe import DataConfig
from dit_lora.data.chat.annotations import read_conversations
from dit_lora.data.chat.conversation import Conversation, Turn
from dit_lora.data.media.media import MediaFile
from dit_lora.errors import DitLoraError

QA = [{"q": "What is it?", "a": "A disc."}]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in ("a.mp4", "b.webm", "c.gif", "p.png", "sub/q.JPG"):
        (tmp_path / name).write_bytes(b"media")
    return tmp_path


def config(**values: Any) -> DataConfig:
    return DataConfig(frames=8, height=32, width=48, **values)


def write(root: Path, records: Any, name: str = "train.json") -> Path:
    text = records if isinstance(records, str) else json.dumps(records)
    (root / name).write_text(text, encoding="utf-8")
    return root / name


def read(root: Path, records: Any) -> list[Conversation]:
    read_result = read_conversations(config(path=str(write(root, records))))
    assert not read_result.problems
    return read_result.usable


def codes(root: Path, *records: Any) -> list[tuple[str, str]]:
    """The ids and codes of the problems, where a good record comes last."""
    good = {"image": "p.png", "QA": QA}
    read_result = read_conversations(config(path=str(write(root, [*records, good]))))
    assert [sample.id for sample in read_result.usable] == ["p.png"]
    return [(finding.file, finding.code) for finding in read_result.problems]


def words(root: Path, record: Any) -> str:
    read_result = read_conversations(config(path=str(write(root, [record, {"QA": QA}]))))
    return "; ".join(problem.message for problem in read_result.problems)


def test_annotations_of_videochat2(root: Path) -> None:
    records = [
        {"video": "a.mp4", "QA": [{"i": " Answer. ", "q": "What?", "a": "A disc."}, *QA]},
        {"image": "sub/q.JPG", "QA": [{"q": "", "a": "A square."}]},
        {"video": "a.mp4", "QA": QA, "start": 1, "end": 2.5},
        {"video": "./c.gif", "QA": QA},
        {"QA": QA},
    ]
    video, image, part, gif, text = read(root, records)
    assert video == Conversation(
        "a.mp4",
        "video",
        MediaFile(root / "a.mp4"),
        (Turn("What?", "A disc.", " Answer. "), Turn("What is it?", "A disc.")),
        is_independent=True,
    )
    assert (image.id, image.kind, image.turns) == (
        "sub/q.JPG",
        "image",
        (Turn("", "A square."),),
    )
    assert (part.id, part.start, part.end) == ("a.mp4#2", 1, 2.5)
    assert (gif.id, gif.kind) == ("c.gif", "video")
    assert (text.id, text.kind, text.media) == ("train.json#5", "text", None)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


ANSWER = {"role": "assistant", "content": "A disc."}
SAID = (Turn("What is it?", "A disc."),)
MEDIUM = {
    "a key of its own": {"image": "p.png", "messages": [user("What is it?"), ANSWER]},
    "a list": {"images": ["p.png"], "messages": [user("<image>What is it?"), ANSWER]},
    "a place in parts": {
        "images": ["p.png"],
        "messages": [user([{"type": "image"}, {"type": "text", "text": "What is it?"}]), ANSWER],
    },
    "a part with its file": {
        "messages": [
            user([{"type": "image", "image": "p.png"}, {"type": "text", "text": "What is it?"}]),
            {"role": "assistant", "content": [{"type": "text", "text": "A disc."}]},
        ]
    },
    "a part with its path": {
        "messages": [
            user([{"type": "text", "text": "What is it?"}, {"type": "image", "path": "p.png"}]),
            ANSWER,
        ]
    },
    "nulls where a table had columns": {
        "images": ["p.png"],
        "videos": None,
        "messages": [
            user([{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}]),
            ANSWER,
        ],
    },
    "LLaVA": {
        "id": "7",
        "image": "p.png",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat is it?"},
            {"from": "gpt", "value": "A disc."},
        ],
    },
    "LLaVA, the place at the end": {
        "image": "p.png",
        "conversations": [
            {"from": "human", "value": "What is it?\n<image>"},
            {"from": "gpt", "value": "A disc."},
        ],
    },
}


@pytest.mark.parametrize("how", MEDIUM)
def test_an_image_is_named_in_many_ways(root: Path, how: str) -> None:
    (sample,) = read(root, [MEDIUM[how]])
    assert (sample.id, sample.kind, sample.media) == ("p.png", "image", MediaFile(root / "p.png"))
    assert sample.turns == SAID
    assert not sample.is_independent


def test_a_video_of_llava_has_the_place_of_an_image(root: Path) -> None:
    conversations = [
        {"from": "human", "value": "<image>\nWhat is it?"},
        {"from": "gpt", "value": "A disc."},
    ]
    (sample,) = read(root, [{"video": "b.webm", "conversations": conversations}])
    assert (sample.kind, sample.turns) == ("video", SAID)


def test_several_turns_and_a_system(root: Path) -> None:
    second_turn = [user("And now?"), {"role": "assistant", "content": " Two. "}]
    system = {"role": "system", "content": "Be brief."}
    records = [
        {"messages": [system, user("What is it?"), ANSWER, *second_turn]},
        {"messages": [user("What is it?"), ANSWER, *second_turn], "system": "Be kind."},
    ]
    brief, kind = read(root, records)
    assert (brief.system, kind.system) == ("Be brief.", "Be kind.")
    assert brief.turns == kind.turns == (*SAID, Turn("And now?", "Two."))
    assert [sample.kind for sample in (brief, kind)] == ["text", "text"]


def test_lists_and_lines_are_told_apart_by_their_content(root: Path) -> None:
    records = [{"QA": [{"q": "é\u2028?", "a": "1"}]}, {"video": "a.mp4", "QA": QA}]
    lines = "\n\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n"
    expected = read(root, records)
    assert read(root, "\ufeff \n" + json.dumps(records, indent=2)) == expected
    samples = read(root, lines)
    assert [sample.turns for sample in samples] == [sample.turns for sample in expected]
    assert [sample.id for sample in samples] == ["train.json#1", "a.mp4"]
    assert [sample.id for sample in read(root, "\n" + lines)] == ["train.json#2", "a.mp4"]


def test_files_that_cannot_be_read_are_named(root: Path) -> None:
    with pytest.raises(DitLoraError, match=r"gone\.json does not exist"):
        read_conversations(config(path=str(root / "gone.json")))
    with pytest.raises(DitLoraError, match="is a folder; give a"):
        read_conversations(config(path=str(root)))
    (root / "train.json").write_bytes(b'[{"QA": "\xff"}]')
    with pytest.raises(DitLoraError, match=r"cannot read .*train\.json as UTF-8"):
        read_conversations(config(path=str(root / "train.json")))
    path = str(write(root, [{"QA": QA}]))
    with pytest.raises(DitLoraError, match=r"the folder of media .*gone does not exist"):
        read_conversations(config(path=path, media=str(root / "gone")))
    with pytest.raises(DitLoraError, match="caption_column applies to captions"):
        read_conversations(config(path=path, caption_column="text"))


BAD: dict[str, tuple[Any, str, str]] = {
    # record, id, code
    "no object": (["a"], "train.json#1", "record_type"),
    "no known keys": ({"image": "sub/q.JPG", "text": "x"}, "sub/q.JPG", "record_keys"),
    "a misspelt key": ({"vidoe": "a.mp4", "QA": QA}, "train.json#1", "record_keys"),
    "no answer key": ({"video": "a.mp4", "QA": [{"q": "x"}]}, "a.mp4", "record_keys"),
    "no role": ({"messages": [{"content": "x"}, ANSWER]}, "train.json#1", "record_keys"),
    "QA no list": ({"video": "a.mp4", "QA": {"q": "x", "a": "y"}}, "a.mp4", "record_type"),
    "a number for an answer": (
        {"video": "a.mp4", "QA": [{"q": "x", "a": 3}]},
        "a.mp4",
        "record_type",
    ),
    "a medium that is no name": ({"video": 3, "QA": QA}, "train.json#1", "record_type"),
    "sound": ({"messages": [user([{"type": "audio"}]), ANSWER]}, "train.json#1", "record_type"),
    "a start that is text": (
        {"video": "a.mp4", "QA": QA, "start": "1", "end": 2},
        "a.mp4",
        "record_type",
    ),
    "an endless end": ({"video": "a.mp4", "QA": QA, "end": float("inf")}, "a.mp4", "record_type"),
    "no width": ({"QA": [{"q": "x", "a": "\u200b\0"}]}, "train.json#1", "answer_empty"),
    "a book": ({"QA": [{"q": "x" * 1_000_001, "a": "x"}]}, "train.json#1", "too_long"),
    "an empty answer": ({"QA": [{"q": "x", "a": " "}]}, "train.json#1", "answer_empty"),
    "an empty message": (
        {"messages": [user("x"), {**ANSWER, "content": ""}]},
        "train.json#1",
        "answer_empty",
    ),
    "an empty QA": ({"video": "a.mp4", "QA": []}, "a.mp4", "no_answer"),
    "only a question": ({"messages": [user("x")]}, "train.json#1", "no_answer"),
    "an empty question": ({"QA": [{"q": "", "a": "x"}]}, "train.json#1", "question_empty"),
    "two questions": ({"messages": [user("x"), user("y"), ANSWER]}, "train.json#1", "roles_order"),
    "two answers": ({"messages": [user("x"), ANSWER, ANSWER]}, "train.json#1", "roles_order"),
    "a question at the end": (
        {"messages": [user("x"), ANSWER, user("y")]},
        "train.json#1",
        "roles_order",
    ),
    "a late system": (
        {"messages": [user("x"), ANSWER, {"role": "system", "content": "y"}]},
        "train.json#1",
        "roles_order",
    ),
    "a tool": (
        {"messages": [user("x"), {"role": "tool", "content": "y"}, ANSWER]},
        "train.json#1",
        "role_unknown",
    ),
    "no length": ({"video": "a.mp4", "QA": QA, "start": 2, "end": 2}, "a.mp4", "time_range"),
    "a part of an image": ({"image": "sub/q.JPG", "QA": QA, "end": 2}, "sub/q.JPG", "time_range"),
    "two media": (
        {"image": "p.png", "video": "a.mp4", "QA": QA},
        "train.json#1",
        "several_media",
    ),
    "missing": ({"video": "sub/gone.mp4", "QA": QA}, "sub/gone.mp4", "missing"),
    "out of the root": ({"video": "../a.mp4", "QA": QA}, "train.json#1", "unsafe_path"),
    "elsewhere": ({"video": "/a.mp4", "QA": QA}, "train.json#1", "unsafe_path"),
    "on the net": ({"video": "https://x.org/a.mp4", "QA": QA}, "train.json#1", "remote_media"),
    "bytes": ({"image": "data:image/png;base64,aa", "QA": QA}, "train.json#1", "remote_media"),
    "in a store": ({"video": "p2:s3://x/a.mp4", "QA": QA}, "train.json#1", "remote_media"),
    "a folder of frames": ({"video": "sub", "QA": QA}, "sub", "frame_folder"),
    "an image for a video": ({"video": "sub/q.JPG", "QA": QA}, "sub/q.JPG", "media_kind"),
    "a GIF for an image": ({"image": "c.gif", "QA": QA}, "c.gif", "media_kind"),
    "a place without a medium": (
        {"messages": [user("<video>x"), ANSWER]},
        "train.json#1",
        "placeholder",
    ),
    "two places": (
        {"image": "sub/q.JPG", "messages": [user("<image><image>"), ANSWER]},
        "sub/q.JPG",
        "placeholder",
    ),
    "a place further on": (
        {"video": "a.mp4", "messages": [user("x"), ANSWER, user("<video>y"), ANSWER]},
        "a.mp4",
        "placeholder",
    ),
    "a medium in an answer": (
        {"messages": [user("x"), {**ANSWER, "content": [{"type": "image", "path": "sub/q.JPG"}]}]},
        "sub/q.JPG",
        "placeholder",
    ),
    "half a character": ({"QA": [{"q": "\ud83d", "a": "x"}]}, "train.json#1", "caption_not_text"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_record_is_a_problem_with_its_code(root: Path, what: str) -> None:
    record, id, code = BAD[what]
    problem_codes = codes(root, record)
    assert (id, code) in problem_codes
    if what not in ("a medium in an answer", "sound", "no role"):
        assert problem_codes == [(id, code)]


@pytest.mark.parametrize(
    "token",
    ["<Video>", "</Video>", "<Image>", "</Image>", "[INST]", "[/INST]", "</s>", "<image>"],
)
@pytest.mark.parametrize("place", ["i", "q", "a"])
def test_tokens_of_prompts_in_a_text_are_reserved(root: Path, token: str, place: str) -> None:
    turn = {"i": "x", "q": "y", "a": "z", place: f"a {token} b"}
    assert codes(root, {"video": "a.mp4", "QA": [*QA, turn]}) == [("a.mp4", "caption_reserved_token")]
    answer = {**ANSWER, "content": f"so {token}"}
    assert codes(root, {"messages": [user("x"), answer]}) == [("train.json#1", "caption_reserved_token")]


def test_every_problem_is_collected_and_says_where_it_is(root: Path) -> None:
    record = {
        "video": "gone.mp4",
        "QA": [{"q": "<Video>", "a": ""}, {"q": 1, "a": "x"}, {"a": "x"}],
        "start": 3,
        "end": 1,
    }
    problem_codes = {code for _, code in codes(root, record)}
    assert problem_codes == {
        "missing",
        "caption_reserved_token",
        "answer_empty",
        "record_type",
        "record_keys",
        "time_range",
    }
    message = words(root, record)
    for part in (
        f"no such file: {root / 'gone.mp4'} (record 1)",
        "it starts at 3 s and ends at 1 s",
        "q of QA 2 is of type int, not text",
        "the answer of QA 1 is empty",
        "QA 3 lacks q",
    ):
        assert part in message
    two_image_record = {
        "images": ["p.png", "sub/q.JPG"],
        "messages": [user("<image><image>"), ANSWER],
    }
    assert words(root, two_image_record) == ("it names 2 media, p.png, sub/q.JPG; a sample has at most one (record 1)")


def test_a_double_is_found_and_a_second_question_is_none(root: Path) -> None:
    clip_record = {"video": "a.mp4", "QA": QA, "start": 1, "end": 2}
    same_record = {"video": "sub/../a.mp4", "QA": QA}
    path = write(root, [{"video": "a.mp4", "QA": QA}, clip_record, same_record, {"QA": QA}, {"QA": QA}])
    read_result = read_conversations(config(path=str(path)))
    assert [sample.id for sample in read_result.usable] == ["a.mp4", "a.mp4#2", "train.json#4"]
    assert [(finding.file, finding.code, finding.message) for finding in read_result.problems] == [
        ("a.mp4#3", "duplicate_record", "it is the same as a.mp4 (record 3)"),
        ("train.json#5", "duplicate_record", "it is the same as train.json#4 (record 5)"),
    ]


def test_a_bad_line_is_a_problem_of_its_own(root: Path) -> None:
    path = write(root, '{"QA": [{"q": "x", "a": "y"}]}\n{"QA"\n', "lines.jsonl")
    read_result = read_conversations(config(path=str(path)))
    assert [sample.id for sample in read_result.usable] == ["lines.jsonl#1"]
    assert [(finding.file, finding.code) for finding in read_result.problems] == [("lines.jsonl#2", "unreadable")]


def test_media_may_be_elsewhere_and_a_link_is_followed(root: Path, tmp_path: Path) -> None:
    notes = root / "notes"
    notes.mkdir()
    (root / "sub" / "link.mp4").symlink_to(root / "a.mp4")
    path = write(notes, [{"video": "link.mp4", "QA": QA}, {"video": str(root / "sub/link.mp4")}])
    read_result = read_conversations(config(path=str(path), media=str(root / "sub")))
    assert [(sample.id, sample.media) for sample in read_result.usable] == [
        ("link.mp4", MediaFile(root / "sub" / "link.mp4"))
    ]
    assert [problem.file for problem in read_result.problems] == ["link.mp4#2"]


def test_sources_have_names_weights_and_repeats_as_clips_have(root: Path) -> None:
    (root / "one").mkdir()
    annotations = [{"image": "p.png", "QA": [{"q": str(k), "a": "x"}]} for k in range(4)]
    first_file = write(root, annotations)
    second = write(root / "one", [{"video": "a.mp4", "QA": QA}, {"video": "gone.mp4", "QA": QA}])
    sources = [
        {"path": str(first_file), "weight": 1, "loss_weight": 0.5},
        {"path": str(second), "media": str(root), "weight": 2},
    ]
    read_result = read_conversations(config(sources=sources))
    assert [sample.id for sample in read_result.usable[-2:]] == [
        "train.json/p.png#4",
        "train.json-2/a.mp4",
    ]
    assert [(sample.times_per_epoch, sample.loss_weight) for sample in read_result.usable] == [(1, 0.5)] * 4 + [(8, 1)]
    assert [problem.file for problem in read_result.problems] == ["train.json-2/gone.mp4"]
    sources = [{"path": str(first_file), "repeats": 3}, {"path": str(second), "media": str(root)}]
    assert [sample.times_per_epoch for sample in read_conversations(config(sources=sources)).usable] == [3] * 4 + [1]
    sources = [{"path": str(root / "x.json")}, {"path": str(root / "y.json")}]
    with pytest.raises(DitLoraError, match=r"(?s)sources\[0\]: .*x\.json.*sources\[1\]: .*y\.json"):
        read_conversations(config(sources=sources))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "train.json has no records"),
        (
            "what\nis it",
            "none of its 2 records can be used; .* not JSON: column 1: Expecting value",
        ),
        ('{"a": 1}', "none of its 1 records can be used; .* it has none of the keys QA"),
    ],
)
def test_a_file_without_anything_usable_is_one_error(root: Path, text: str, message: str) -> None:
    with pytest.raises(DitLoraError, match=message):
        read(root, text)


def test_messages_keep_the_indent_of_answers(root: Path) -> None:
    parts = [{"type": "text", "text": "  if x:\n"}, {"type": "text", "text": "    y "}]
    messages = [
        {"role": "user", "content": " Which code? "},
        {"role": "assistant", "content": parts},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "\n\tz\n"},
    ]
    (sample,) = read(root, [{"messages": messages}])
    assert sample.turns == (Turn("Which code?", "  if x:\n    y"), Turn("And then?", "\tz"))
