"""The page of captions: what it shows."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bare_media import write_captioned_folder
from PIL import Image

from dit_lora.data.media.video import write_video
from dit_lora.data.sources.caption_table import CaptionTable
from dit_lora.report.captions.page import check_table_captions, write_captions_page
from dit_lora.report.captions.rules import CaptionRules


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_captioned_folder(tmp_path / "my clips")


def test_captions_are_judged_as_the_audit_does_and_by_the_trigger(folder: Path) -> None:
    table = CaptionTable.read(folder)
    findings = check_table_captions(table, CaptionRules(trigger="sks"))
    codes = [[finding.code for finding in findings.get(name, [])] for name in table.media]
    assert codes == [
        ["caption_duplicate", "trigger_missing"],
        ["caption_duplicate", "trigger_missing"],
        ["trigger_missing"],
        [],
        ["caption_missing"],
    ]
    assert not {"trigger_missing"} & {
        f.code for fs in check_table_captions(table, CaptionRules()).values() for f in fs
    }


def test_the_written_page_is_self_contained_and_escaped(folder: Path, tmp_path: Path) -> None:
    table = CaptionTable.read(folder)
    for page_path in (folder / "captions.html", tmp_path / "elsewhere" / "page.html"):
        page = write_captions_page(page_path, table, CaptionRules()).read_text()
        assert "<script" not in page.lower().replace("&lt;script", "")
        assert "<img src=x" not in page
        assert page.count("data:image/jpeg;base64,") == 5
        linked = 'href="stills/' in page
        assert linked == (page_path.parent == folder)


def test_a_clips_thumbnail_has_three_frames_and_needs_no_torch(tmp_path: Path) -> None:
    """A page would wait seconds for torch, which the first thumbnail would import."""
    # Six frames of rising brightness.
    video = torch.arange(0, 240, 40, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 32, 64, 3).contiguous()
    write_video(tmp_path / "clip.mp4", video, 6.0)
    code = (
        "import sys; from pathlib import Path; from dit_lora.report.captions.thumbnails import make_thumbnail; "
        "Path(sys.argv[2]).write_bytes(make_thumbnail(Path(sys.argv[1]))); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "clip.mp4", tmp_path / "out.jpg"], check=True)
    picture = Image.open(tmp_path / "out.jpg").convert("L")
    assert picture.size == (960, 160)
    levels = [picture.getpixel((320 * number + 160, 80)) for number in range(3)]
    # Of the frames 1, 3 and 5.
    assert levels == pytest.approx([40, 120, 200], abs=12)
