"""Records of JSON lists and lines, however the file is cut while it is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from dit_lora.data.chat import json_records
from dit_lora.data.chat.json_records import read_records
from dit_lora.errors import DitLoraError

RECORDS = [
    {"video": "a.mp4", "QA": [{"q": '"[]{},\\', "a": "ü 😀"}], "start": 1.25, "end": 12.5e1},
    {"QA": [1, None, True]},
    12345,
    "",
]


def read(folder: Path, text: str) -> list[Any]:
    (folder / "a.json").write_text(text, encoding="utf-8")
    records = list(read_records(folder / "a.json"))
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    return [record.value if record.fault is None else record.fault for record in records]


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 20])
def test_a_list_may_be_cut_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(json_records, "_CHUNK_CHARS", chunk)
    for json_options in (
        {"indent": 1},
        {"ensure_ascii": False, "separators": (",", ":")},
        {"indent": "\t"},
    ):
        assert read(tmp_path, json.dumps(RECORDS, **json_options)) == RECORDS  # type: ignore[arg-type]
    assert read(tmp_path, "[1234567890, 1]\n") == [1234567890, 1]


@pytest.mark.parametrize("chunk", [1, 3, 50, 1 << 20])
@pytest.mark.parametrize(("old", "new"), [('"end"', '"end'), ("12345", "12x45"), ("true", "yes")])
def test_a_fault_is_found_where_the_whole_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, old: str, new: str
) -> None:
    monkeypatch.setattr(json_records, "_CHUNK_CHARS", chunk)
    text = json.dumps(RECORDS, indent=1).replace(old, new)
    with pytest.raises(ValueError, match="line") as error:
        json.loads(text)
    line, column = error.value.lineno, error.value.colno  # type: ignore[attr-defined]
    with pytest.raises(DitLoraError, match=rf"a\.json is not valid JSON: line {line}, column {column}: "):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1", "line 1, column 3: a comma or the end of the list"),
        ("[", "line 1, column 2: Expecting value"),
        ("[1,\n ]", "line 2, column 2: Expecting value"),
        ("[1]\n{}", "line 2, column 1: unexpected text after"),
        ("[1 2]", "line 1, column 4: a comma or the end of the list"),
        ("[" + "9" * 5000 + "]", "line 1, column 2: it holds a whole number of more"),
    ],
)
def test_a_list_that_is_no_json_is_one_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DitLoraError, match=rf"a\.json is not valid JSON: {message}"):
        read(tmp_path, text)


def test_an_empty_list_and_an_empty_file_have_no_records(tmp_path: Path) -> None:
    assert read(tmp_path, " [ ]\n") == read(tmp_path, "") == read(tmp_path, "\n \n") == []


def test_of_lines_each_bad_one_is_told(tmp_path: Path) -> None:
    values = read(tmp_path, '\ufeff{"a": 1}\n{"a"\n"b"')
    assert values == [{"a": 1}, "column 5: Expecting ':' delimiter", "b"]


def test_no_more_than_a_few_chunks_are_in_memory(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" + ",".join(['"' + "x" * 999 + '"'] * 8000) + "]")
    longest = 0
    with (tmp_path / "a.json").open() as file:
        reader = json_records._JsonListReader(tmp_path / "a.json", file)
        for _ in reader:
            longest = max(longest, len(reader._text))
    assert longest < 2.1 * json_records._CHUNK_CHARS
