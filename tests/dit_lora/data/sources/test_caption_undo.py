"""Writes to a table of captions are taken back byte for byte, and never over the work of others."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.data.audit.stored_audit import AUDIT_FILE, SampleFilter, StoredAudit
from dit_lora.data.sources.caption_changes import CaptionChange
from dit_lora.data.sources.caption_table import CaptionTable, lock_table
from dit_lora.errors import DitLoraError
from dit_lora.report.captions.edits import CaptionEdits
from dit_lora.report.captions.rules import CaptionRules

TABLES = (
    b'{"file_name": "a.png", "text": "caf\\u00e9"}\n{"file_name":"b.png" ,"text": "b"}\n',
    b'{"file_name": "a.png", "text": "a"}\r\n{"file_name": "b.png", "text": "b"}\r\n',
    b'\xef\xbb\xbf{"file_name": "a.png", "text": "no newline at the end"}',
    b'\n\n{"file_name": "a.png"}\nnot JSON \n',
    b"",
)


def write_folder(root: Path, table: bytes | None) -> Path:
    root.mkdir(exist_ok=True)
    for name in ("a.png", "b.png", "c.png"):
        (root / name).write_bytes(b"media")
    if table is not None:
        (root / "metadata.jsonl").write_bytes(table)
    return root


def write(root: Path, **captions: str) -> None:
    with lock_table(root) as table:
        table.write_captions({f"{stem}.png": text for stem, text in captions.items()})


def undo(root: Path, step_id: str | None = None) -> int:
    with lock_table(root) as table:
        return table.undo(step_id).num_captions


@pytest.mark.parametrize("table", TABLES)
def test_every_write_is_taken_back_in_turn(tmp_path: Path, table: bytes) -> None:
    path = write_folder(tmp_path, table) / "metadata.jsonl"
    states = [table]
    for captions in ({"a": "new"}, {"c": "added"}, {"a": "again", "b": "\ud800 half"}):
        write(tmp_path, **captions)
        states.append(path.read_bytes())
    assert len(set(states)) == 4
    for state, count in zip(states[2::-1], (2, 1, 1), strict=True):
        assert undo(tmp_path) == count
        assert path.read_bytes() == state
    with pytest.raises(DitLoraError, match="nothing can be undone"):
        undo(tmp_path)


def test_a_table_that_was_made_from_texts_is_removed_again(tmp_path: Path) -> None:
    write_folder(tmp_path, None)
    (tmp_path / "a.txt").write_text("from a text")
    write(tmp_path, b="new")
    assert CaptionTable.read(tmp_path).captions == {"a.png": "from a text", "b.png": "new"}
    undo(tmp_path)
    assert not (tmp_path / "metadata.jsonl").exists()
    assert CaptionTable.read(tmp_path).captions == {"a.png": "from a text"}


def test_old_steps_are_deleted_by_number_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path, TABLES[0]) / ".captions" / "undo"
    for number in range(60):
        write(tmp_path, a=f"text {number}")
    assert [path.stem for path in sorted(folder.iterdir())] == [f"{number:08d}" for number in range(11, 61)]
    # Three steps fit; a long one takes the space of all others, and can still be undone.
    monkeypatch.setattr("dit_lora.data.sources.caption_undo._MAX_BYTES", 3 * 500)
    write(tmp_path, a="x" * 2000)
    assert 1 < len(list(folder.iterdir())) <= 5
    write(tmp_path, a="short")
    assert len(list(folder.iterdir())) == 1
    assert undo(tmp_path) == 1
    assert CaptionTable.read(tmp_path).captions["a.png"] == "x" * 2000


def test_what_others_have_written_since_stays(tmp_path: Path) -> None:
    path = write_folder(tmp_path, TABLES[0]) / "metadata.jsonl"
    write(tmp_path, a="new")
    step = CaptionTable.read(tmp_path).undo_step
    assert step is not None
    by_hand = path.read_bytes().replace(b'"b"}', b'"by hand"}')
    path.write_bytes(by_hand)
    assert CaptionTable.read(tmp_path).undo_step is None
    with pytest.raises(DitLoraError, match="changed since the last write"):
        undo(tmp_path)
    assert path.read_bytes() == by_hand
    write(tmp_path, a="newer")
    with pytest.raises(DitLoraError, match="load the page again"):
        undo(tmp_path, step.step_id)
    assert undo(tmp_path) == 1
    assert path.read_bytes() == by_hand


def test_a_step_of_a_write_that_failed_is_skipped_and_a_damaged_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_folder(tmp_path, TABLES[0]) / "metadata.jsonl"
    write(tmp_path, a="new")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dit_lora.data.sources.caption_table.overwrite_file_atomically", fail)
        with pytest.raises(DitLoraError, match="cannot write"):
            write(tmp_path, a="lost")
    assert undo(tmp_path) == 1
    assert path.read_bytes() == TABLES[0]
    write(tmp_path, a="new")
    (file,) = (tmp_path / ".captions" / "undo").iterdir()
    file.write_text(file.read_text().replace("caf", "tea"))
    with pytest.raises(DitLoraError, match="is damaged"):
        undo(tmp_path)
    assert CaptionTable.read(tmp_path).captions["a.png"] == "new"


def test_many_captions_change_in_one_write_or_none_does(tmp_path: Path) -> None:
    write_folder(tmp_path, b"")
    write(tmp_path, a="a dog, a Dog", b="sks dog")
    edits = CaptionEdits(tmp_path, CaptionRules())
    preview = edits.apply(CaptionChange("dog", "cat", "sks"), SampleFilter())
    assert preview.captions["a.png"] == ("a dog, a Dog", "sks, a cat, a Dog")
    assert CaptionTable.read(tmp_path).captions == {"a.png": "sks, a cat, a Dog", "b.png": "sks cat"}
    with pytest.raises(DitLoraError, match="its caption is empty"):
        edits.apply(CaptionChange("sks cat", " "), SampleFilter())
    # Files without a caption get no trigger word only.
    assert edits.preview(CaptionChange(trigger="xyz"), SampleFilter(text="C.PNG")).captions == {}
    stale = edits.apply(CaptionChange("sks", "tok"), SampleFilter(), version="another")
    assert (len(stale.captions), stale.version != "another") == (2, True)
    assert "sks cat" in CaptionTable.read(tmp_path).captions.values()


def test_files_are_chosen_by_findings_shape_and_length(tmp_path: Path) -> None:
    write_folder(tmp_path, b"")
    write(tmp_path, a="a", b="b")
    rows = [
        {"file": "a.png", "verdict": "warn", "reasons": ["blurred: soft"], "facts": {"width": 9, "height": 16}},
        {"file": "b.png", "verdict": "ok", "reasons": [], "facts": {"width": 100, "height": 99, "frames": 1}},
        {
            "file": "c.png",
            "verdict": "reject",
            "reasons": ["too_short: 3 frames", "caption_long: old", "dark: black"],
            "verdicts": ["reject", "warn", "warn"],
            "facts": {"width": 1920, "height": 1080, "seconds": 2.0, "frames": 48},
        },
    ]
    (tmp_path / AUDIT_FILE).write_text(json.dumps({"samples": rows}))
    edits = CaptionEdits(tmp_path, CaptionRules())
    for names, texts in (
        ("abc", []),
        ("ac", ["finding=any"]),
        ("c", ["finding=caption_missing"]),
        ("", ["finding=caption_long"]),
        ("a", ["finding=blurred", "shape=portrait"]),
        ("b", ["shape=square", "length=picture"]),
        ("c", ["length=2 to 5 s", "shape=landscape"]),
        ("b", ["text=B.P"]),
    ):
        lines = edits.list_caption_lines(SampleFilter.from_texts(texts))
        assert [line[0] for line in lines] == list(names), texts
    (line,) = edits.list_caption_lines(SampleFilter(length="2 to 5 s"))
    assert line == "c.png\t0\ttoo_short,dark,caption_missing\t"
    findings = StoredAudit.read(tmp_path).samples["c.png"].findings
    assert [finding.verdict for finding in findings] == ["reject", "warn"]
    for text in ("shape=round", "length=1", "color=red", "x"):
        with pytest.raises(DitLoraError):
            SampleFilter.from_texts([text])
    for damaged in ("", "[]", '{"samples": [1]}', '{"samples": [{"file": "a.png"}]}'):
        (tmp_path / AUDIT_FILE).write_text(damaged)
        assert StoredAudit.read(tmp_path).samples == {}


def test_the_command_line_replaces_lists_and_undoes(tmp_path: Path) -> None:
    path = write_folder(tmp_path, TABLES[1]) / "metadata.jsonl"

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["caption", str(tmp_path), *arguments])
        return result.exit_code, f"{result.output}{result.exception or ''}"

    assert "changed 1 captions" in run("--replace", "b", "bee")[1]
    code, text = run("--add-trigger", "--trigger", "sks", "--list", "--only", "text=bee")
    assert (code, text.splitlines()[1:]) == (0, ["b.png\t2\tok\tsks, bee"])
    assert run("--undo")[0] == run("--undo")[0] == 0
    assert path.read_bytes() == TABLES[1]
    assert "nothing can be undone" in run("--undo")[1]
    assert "--add-trigger needs --trigger" in run("--add-trigger")[1]
