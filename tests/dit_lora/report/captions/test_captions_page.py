"""The page of captions: what it shows."""

from pathlib import Path

import pytest
from bare_media import write_captioned_folder

from dit_lora.data.sources.caption_table import CaptionTable
from dit_lora.report.captions.page import check_table_captions, write_captions_page
from dit_lora.report.captions.rules import TextRules


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_captioned_folder(tmp_path / "my clips")


def test_captions_are_judged_as_the_audit_does_and_by_the_trigger(folder: Path) -> None:
    table = CaptionTable.read(folder)
    findings = check_table_captions(table, TextRules(trigger="sks"))
    codes = [[finding.code for finding in findings.get(name, [])] for name in table.media]
    assert codes == [
        ["caption_duplicate", "trigger_missing"],
        ["caption_duplicate", "trigger_missing"],
        ["trigger_missing"],
        [],
        ["caption_missing"],
    ]
    assert not {"trigger_missing"} & {f.code for fs in check_table_captions(table, TextRules()).values() for f in fs}


def test_the_written_page_is_self_contained_and_escaped(folder: Path, tmp_path: Path) -> None:
    table = CaptionTable.read(folder)
    for page_path in (folder / "captions.html", tmp_path / "elsewhere" / "page.html"):
        page = write_captions_page(page_path, table, TextRules()).read_text()
        assert "<script" not in page.lower().replace("&lt;script", "")
        assert "<img src=x" not in page
        assert page.count("data:image/jpeg;base64,") == 5
        linked = 'href="stills/' in page
        assert linked == (page_path.parent == folder)
