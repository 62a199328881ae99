"""Nothing that is written into captions is lost or altered: by several editors, a caption command, or the page."""

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from dit_lora.commands import caption as captions
from dit_lora.commands.caption import CaptionRequest, caption_folder
from dit_lora.data.audit.stored_audit import SampleFilter
from dit_lora.data.sources.caption_table import CaptionTable, lock_table
from dit_lora.errors import DitLoraError
from dit_lora.report.captions import edits as caption_edits
from dit_lora.report.captions.edits import CaptionEdits, StaleCaptionError
from dit_lora.report.captions.page import (
    CaptionFindings,
    check_table_captions,
    compute_caption_version,
    decode_address,
    encode_address,
    write_captions_page,
)
from dit_lora.report.captions.rules import CaptionRules

PLAUSIBLE = [
    "/imagine a cat",
    "my password is 12345",
    "a photo of /home/ann/cats on a screen",
    "C:\\Users\\ann\\cat.png",
    "sk-abcdefghijklmnopqrstuvwxyz0123456789",
    "hf_abcdefghijklmnopqrstuvwxyz",
    "<script>alert(1)</script>",
    "</textarea>&amp;\"'",
    "\U0001f408 caf\u00e9 \u732b",
    "first\r\nsecond\r\n",
    "first\rsecond\nthird",
    "\n\nleading lines",
    "  trailing spaces   ",
    "tab\t\x0b\x0c nul \x00 end",
    "a\u2028b\u00a0c",
    "data:image/png;base64,AAAA",
]


def read_cards(edits: CaptionEdits) -> dict[str, Any]:
    """The cards of the first page by name."""
    return {card.name: card for card in edits.build_sheet(SampleFilter(), 1).cards}


def write_folder(root: Path, captions: dict[str, str]) -> Path:
    root.mkdir(exist_ok=True)
    for name in captions:
        (root / name).write_bytes(b"media")
    lines = [json.dumps({"file_name": name, "n": 1.5, "text": text}) for name, text in captions.items()]
    (root / "metadata.jsonl").write_text("\n".join(lines))
    return root


def test_the_page_shows_what_the_file_holds_and_an_unchanged_save_changes_no_byte(
    tmp_path: Path,
) -> None:
    by_name = {f"{number:02}.png": text for number, text in enumerate(PLAUSIBLE)}
    folder = write_folder(tmp_path / "my token=abcdefgh12345678", by_name)
    before = (folder / "metadata.jsonl").read_bytes()
    edits = CaptionEdits(folder, CaptionRules())
    cards = read_cards(edits)
    assert {name: json.loads(card.caption_json) for name, card in cards.items()} == by_name
    for name, card in cards.items():
        # A browser's text area has line ends of its own.
        for text in (card.caption, card.caption.replace("\r\n", "\n").replace("\r", "\n")):
            edits.save_caption(name, text, card.version)
    assert (folder / "metadata.jsonl").read_bytes() == before


@pytest.mark.parametrize("text", PLAUSIBLE)
def test_a_changed_caption_is_written_as_it_is_typed(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path, {"a.png": "old"})
    state = CaptionEdits(folder, CaptionRules()).save_caption("a.png", text, compute_caption_version("old"))
    assert state.caption == text
    assert CaptionTable.read(folder).captions["a.png"] == text


def test_line_ends_of_windows_stay_in_an_edited_caption(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a.png": "first\r\nsecond"})
    edits, version = CaptionEdits(folder, CaptionRules()), compute_caption_version("first\r\nsecond")
    edits.save_caption("a.png", "first\nother", version)
    assert CaptionTable.read(folder).captions["a.png"] == "first\r\nother"


def test_a_stale_edit_is_refused_with_what_is_there(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a.png": "old", "b.png": "other"})
    first_edits, second_edits = (CaptionEdits(folder, CaptionRules()) for _ in range(2))
    version = read_cards(first_edits)["a.png"].version
    assert version == read_cards(second_edits)["a.png"].version
    first_edits.save_caption("a.png", "first", version)
    for server in (first_edits, second_edits):  # another tab of this server, and another server
        with pytest.raises(StaleCaptionError) as error:
            server.save_caption("a.png", "second", version)
        assert error.value.state.caption == "first"
    assert CaptionTable.read(folder).captions["a.png"] == "first"
    second_edits.save_caption("b.png", "of another file", compute_caption_version("other"))
    second_edits.save_caption("a.png", "second", error.value.state.version)
    assert CaptionTable.read(folder).captions == {"a.png": "second", "b.png": "of another file"}
    # By hand, in a text editor.
    text = (folder / "metadata.jsonl").read_text().replace("second", "by hand")
    (folder / "metadata.jsonl").write_text(text)
    with pytest.raises(StaleCaptionError):
        first_edits.save_caption("a.png", "third", compute_caption_version("second"))


EDITOR = """
import sys
from pathlib import Path
from dit_lora.report.captions.page import compute_caption_version
from dit_lora.report.captions.rules import CaptionRules
from dit_lora.report.captions.edits import CaptionEdits, StaleCaptionError

folder, editor = Path(sys.argv[1]), sys.argv[2]
edits = CaptionEdits(folder, CaptionRules())
current = {}
for number in range(400):
    name = f"shared_{number % 8}.png"
    while True:
        caption = current.get(name, "start")
        try:
            state = edits.save_caption(
                name, f"{caption} {editor}{number}", compute_caption_version(caption)
            )
        except StaleCaptionError as error:
            current[name] = error.state.caption
            continue
        current[name] = state.caption
        break
"""


def test_two_editors_and_a_caption_command_lose_none_of_a_thousand_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path, {f"shared_{number}.png": "start" for number in range(8)})
    editors = [subprocess.Popen([sys.executable, "-c", EDITOR, str(folder), name], env=os.environ) for name in "ab"]
    answerer = type("Answerer", (), {"model": None})
    monkeypatch.setattr(captions, "load_answerer", lambda *_, **__: answerer)
    monkeypatch.setattr(captions, "require_finite_logits", nullcontext)
    monkeypatch.setattr(captions, "generate_file_caption", lambda _, file, *__: f"made of {file.name}")
    num_written = 0
    for start in range(0, 200, 10):
        for number in range(start, start + 10):
            (folder / f"made_{number:03}.png").write_bytes(b"media")
        num_written += caption_folder(CaptionRequest(folder, Path("model"))).num_written
    assert num_written == 200
    assert [editor.wait(600) for editor in editors] == [0, 0]
    table = CaptionTable.read(folder)
    caption_words = " ".join(table.captions[f"shared_{number}.png"] for number in range(8)).split()
    assert sorted(word for word in caption_words if word != "start") == sorted(
        f"{editor}{number}" for editor in "ab" for number in range(400)
    )
    assert table.uncaptioned_files == []
    assert len(table.captions) == 208


def test_names_that_are_not_utf8_are_shown_served_and_edited(tmp_path: Path) -> None:
    undecodable_name = os.fsdecode(b"caf\xe9 100%25.png")
    folder = write_folder(tmp_path / "clips", {"a.png": "a"})
    (folder / undecodable_name).write_bytes(b"media")
    edits = CaptionEdits(folder, CaptionRules())
    assert read_cards(edits)[undecodable_name].caption == ""
    assert edits.find_media(decode_address(encode_address(undecodable_name))) == folder / undecodable_name
    edits.save_caption(undecodable_name, "b", compute_caption_version(""))
    assert CaptionTable.read(folder).captions == {"a.png": "a", undecodable_name: "b"}
    write_captions_page(folder / "captions.html", CaptionTable.read(folder), CaptionRules())
    write_captions_page(tmp_path / "page.html", CaptionTable.read(folder), CaptionRules())


def test_findings_that_are_kept_are_those_of_the_whole_audit(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {f"{number}.png": "same sks" for number in range(4)})
    rules = CaptionRules(trigger="sks")
    findings = CaptionFindings(rules)
    for change in (
        {},
        {"0.png": "other sks"},
        {"0.png": " same   sks", "1.png": "new"},
        {"2.png": "new", "3.png": "new"},
    ):
        with lock_table(folder) as table:
            table.write_captions(change)
        assert findings.update(table) == check_table_captions(table, rules)
    (folder / "1.png").unlink()
    (folder / "4.png").write_bytes(b"media")
    table = CaptionTable.read(folder)
    assert findings.update(table) == check_table_captions(table, rules)


def test_a_request_lists_no_folder_that_has_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path, {"a.png": "a", "b.png": "b"})
    os.utime(folder, (1, 1))  # long ago
    edits = CaptionEdits(folder, CaptionRules())
    read_cards(edits)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", None)
        patch.setattr("dit_lora.report.captions.page.check_captions", None)
        read_cards(edits)
        assert edits.find_media("a.png") == folder / "a.png"
    (folder / "c.png").write_bytes(b"media")
    assert edits.find_media("c.png") == folder / "c.png"
    assert "c.png" in read_cards(edits)
    (folder / "b.png").unlink()
    with pytest.raises(DitLoraError, match="no longer in the folder"):
        edits.save_caption("b.png", "x", compute_caption_version("b"))


def test_sheets_of_many_files_come_before_the_first_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "clips", {"0.png": "same", "1.png": "same", "2.png": ""})
    other_folder = write_folder(tmp_path / "other", {"a.png": "a"})
    may_check, check_all_captions = Event(), CaptionEdits.check_all_captions

    def wait_and_check(edits: CaptionEdits, table: CaptionTable) -> Any:
        assert may_check.wait(60)
        return check_all_captions(edits, table)

    monkeypatch.setattr(CaptionEdits, "check_all_captions", wait_and_check)
    monkeypatch.setattr(caption_edits, "_MAX_AWAITED_FILES", 0)
    edits, other = CaptionEdits(folder, CaptionRules()), CaptionEdits(other_folder, CaptionRules())
    sheet = edits.build_sheet(SampleFilter(), 1)
    assert (sheet.is_checked, sheet.codes, [card.findings for card in sheet.cards]) == (False, [], [[], [], []])
    assert {key: sheet.facts[key] for key in ("total", "missing", "flagged")} == {
        "total": 3,
        "missing": 1,
        "flagged": None,
    }
    # The files are served meanwhile, a text is searched for, and another folder has to wait for its check.
    assert edits.find_media("0.png") == folder / "0.png"
    assert edits.build_sheet(SampleFilter(text="SAME"), 1).num_matches == 2
    assert not other.build_sheet(SampleFilter(), 1).is_checked
    assert other._first_check is None
    # An edit during the check counts.
    with lock_table(folder) as table:
        table.write_captions({"1.png": "another"})
    may_check.set()
    # A filter that needs the findings waits for them.
    missing = edits.build_sheet(SampleFilter(finding="caption_missing"), 1)
    assert ([card.name for card in missing.cards], missing.is_checked) == (["2.png"], True)
    sheet = edits.build_sheet(SampleFilter(), 1)
    assert (sheet.facts["flagged"], sheet.codes) == (0, [("caption_missing", 1)])
    while not other.build_sheet(SampleFilter(), 1).is_checked:
        time.sleep(0.01)


def test_txt_files_of_other_pages_are_read_after_the_first_sheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captions = {"0.png": "first", "1.png": "second", "2.png": "third", "3.png": "third"}
    for name, caption in captions.items():
        (tmp_path / name).write_bytes(b"media")
        (tmp_path / name).with_suffix(".txt").write_text(caption)
    # A .txt file without text, and none at all.
    (tmp_path / "3.txt").write_text("")
    (tmp_path / "4.png").write_bytes(b"media")
    may_check, check_all_captions = Event(), CaptionEdits.check_all_captions

    def wait_and_check(edits: CaptionEdits, table: CaptionTable) -> Any:
        assert may_check.wait(60)
        return check_all_captions(edits, table)

    monkeypatch.setattr(CaptionEdits, "check_all_captions", wait_and_check)
    monkeypatch.setattr(caption_edits, "_MAX_AWAITED_FILES", 0)
    monkeypatch.setattr("dit_lora.report.captions.sheet.CARDS_PER_PAGE", 2)
    edits = CaptionEdits(tmp_path, CaptionRules())
    opened = []
    for page_number, shown in ((1, ["first", "second"]), (2, ["third", ""])):
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "open", lambda path, *rest, open=os.open: opened.append(Path(path).name) or open(path, *rest)
            )
            sheet = edits.build_sheet(SampleFilter(), page_number)
        assert [card.caption for card in sheet.cards] == shown
        assert (sheet.num_matches, sheet.facts["total"], sheet.facts["missing"]) == (5, 5, None)
        assert not sheet.has_metadata_rows
    assert opened == ["0.txt", "1.txt", "2.txt", "3.txt"]
    # A text is looked for in all captions, and a caption of another page can be edited.
    assert [card.name for card in edits.build_sheet(SampleFilter(text="SECOND"), 1).cards] == ["1.png"]
    assert edits.find_media("4.png") == tmp_path / "4.png"
    may_check.set()
    while not (sheet := edits.build_sheet(SampleFilter(), 1)).is_checked:
        time.sleep(0.01)
    assert (sheet.facts["missing"], sheet.codes) == (2, [("caption_missing", 2)])
    (tmp_path / "4.txt").write_text("fourth")
    assert edits.build_sheet(SampleFilter(), 3).cards[0].caption == "fourth"
    edits.save_caption("4.png", "edited", compute_caption_version("fourth"))
    captions.pop("3.png")
    assert CaptionTable.read(tmp_path).captions == captions | {"4.png": "edited"}
    assert edits.build_sheet(SampleFilter(), 1).has_metadata_rows


def test_missing_captions_are_counted_where_a_txt_file_belongs_to_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0.png", "1.png", "notes.txt"):
        (tmp_path / name).write_bytes(b"media")
    monkeypatch.setattr(caption_edits, "_MAX_AWAITED_FILES", 0)
    edits = CaptionEdits(tmp_path, CaptionRules())
    while not (sheet := edits.build_sheet(SampleFilter(), 1)).is_checked:
        time.sleep(0.01)
    assert sheet.facts["missing"] == 2


def test_an_edit_before_the_first_check_keeps_the_captions_of_all_txt_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captions = {f"{number}.png": f"caption {number}" for number in range(4)}
    for name, caption in captions.items():
        (tmp_path / name).write_bytes(b"media")
        (tmp_path / name).with_suffix(".txt").write_text(caption)
    monkeypatch.setattr(caption_edits, "_MAX_AWAITED_FILES", 0)
    monkeypatch.setattr("dit_lora.report.captions.sheet.CARDS_PER_PAGE", 2)
    edits = CaptionEdits(tmp_path, CaptionRules())
    edits.build_sheet(SampleFilter(), 1)
    edits.save_caption("0.png", "edited", compute_caption_version("caption 0"))
    assert CaptionTable.read(tmp_path).captions == captions | {"0.png": "edited"}


def test_a_first_check_that_fails_is_reported_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edits = CaptionEdits(write_folder(tmp_path / "clips", {"0.png": "same"}), CaptionRules())
    monkeypatch.setattr(caption_edits, "_MAX_AWAITED_FILES", 0)

    def fail(*_: object) -> None:
        raise DitLoraError("this tokenizer fails")

    with monkeypatch.context() as patch:
        patch.setattr(CaptionEdits, "check_all_captions", fail)
        with pytest.raises(DitLoraError, match="this tokenizer fails"):  # noqa: PT012 -- until the thread has ended
            while not edits.build_sheet(SampleFilter(), 1).is_checked:
                time.sleep(0.01)
    while not edits.build_sheet(SampleFilter(), 1).is_checked:
        time.sleep(0.01)
