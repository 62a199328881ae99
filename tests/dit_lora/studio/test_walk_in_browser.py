"""A walk through the studio's pages in a browser, wide and narrow, light and dark, with stand-ins for the commands."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import quote

import pytest
import torch
from report_runs import write_run
from studio_browser import CHROMIUM, SCREENS, check_page, open_page
from studio_client import serving

from dit_lora.commands.audit import audit_folder
from dit_lora.data.audit.stored_audit import AUDIT_FILE
from dit_lora.data.audit.summary import build_audit_json, write_json
from dit_lora.data.media.video import write_sample
from dit_lora.data.sources.caption_table import CaptionTable
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.report.captions import edits as caption_edits
from dit_lora.report.captions.edits import CaptionEdits
from dit_lora.studio import jobs
from dit_lora.studio.app import build_app, list_pages
from dit_lora.studio.library import RunLibrary, compute_run_id
from dit_lora.studio.server import StudioServer

COMMAND = """
import json, signal, sys, time
# A shell that starts the tests in the background lets all of its processes ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
name = sys.argv[1]
plan = {"phases": {"training": 17.6}, "fits": True, "gpu": 24.0, "cheapest_change": None, "assumed": [],
        "training": {"weights": 10.4, "gradients": 0.2, "optimizer": 0.4, "activations": 5.1}}
if "--json" in sys.argv:
    print(json.dumps(plan if name == "plan" else {"packages": {}, "known_bad": []}, indent=2))
elif name == "train":
    print("step 12 of 200, loss 0.0431", flush=True)
    time.sleep(60)
"""
"""Stands in for the commands."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with samples and saves, and an audited data set with masks."""
    root = tmp_path_factory.mktemp("walk")
    (root / "runs").mkdir()
    for name, brightness in (("kitten", 60), ("snow", 140)):
        folder = write_run(root / "runs" / name)
        shutil.rmtree(folder / "samples", ignore_errors=True)
        for step in (0, 10, 20):
            frame = torch.full((1, 48, 64, 3), brightness + 4 * step).byte()
            write_sample(folder / "samples" / f"step_{step:06d}" / "prompt_00", frame, 8)
        for step in (10, 20):
            save = folder / "checkpoints" / f"step_{step:06d}"
            save.mkdir(parents=True)
            for file in ("pytorch_lora_weights.safetensors", "trainable.safetensors"):
                (save / file).write_bytes(b"weights")
    data = root / "data" / "shapes"
    write_shapes(data, clips=6, frames=9, height=64, width=96, fps=8)
    write_shapes(data, clips=3, frames=1, height=96, width=64, fps=8)
    names = sorted(path.name for path in data.iterdir() if path.suffix in (".mp4", ".png"))
    captions = [f"sks, a shape moves slowly over the ground, take {number}" for number in range(len(names))]
    captions[2], captions[4] = captions[3], '<b>bold</b> &amp; "quoted" <extra_id_0>'
    rows = [{"file_name": name, "text": text} for name, text in zip(names, captions, strict=True)]
    (data / "masks").mkdir()
    pictures = [name for name in names if name.endswith(".png")]
    shutil.copy(data / pictures[0], data / "masks" / "mask.png")
    rows[names.index(pictures[0])] |= {"mask": "masks/mask.png"}
    rows[-1]["text"] = ""
    (data / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for path in data.glob("*.txt"):
        path.unlink()
    write_json(data / AUDIT_FILE, build_audit_json(audit_folder(str(data), progress=False).audited_samples))
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[StudioServer]:
    start = jobs.subprocess.Popen

    def start_script(command: list[str], **options: Any) -> Any:
        return start([sys.executable, "-c", COMMAND, *command[3:]], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.subprocess, "Popen", start_script)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with serving(build_app(list_pages(RunLibrary([root])))) as server:
            yield server


def list_addresses(root: Path) -> dict[str, str]:
    runs = [compute_run_id(root / "runs" / name) for name in ("kitten", "snow")]
    data = f"/data/{compute_run_id(root / 'data' / 'shapes')}/"
    return {
        "runs": "/",
        "compare": f"/compare?run={runs[0]}&run={runs[1]}",
        "run": f"/runs/{runs[0]}/",
        "work": f"/runs/{runs[0]}/work",
        "data": "/data",
        "sheet": data,
        "change": f"{data}change?find=slowly&replacement=quickly&trigger=sks",
        "new": "/new",
        "form": "/new?from=smoke/cogvideox",
        "jobs": "/jobs",
    }


@pytest.mark.parametrize(
    ("width", "scheme"),
    # Each width and each scheme once.
    [pytest.param(*s, marks=() if s in SCREENS[::3] else pytest.mark.thorough) for s in SCREENS],
)
def test_every_page_fits_the_screen(browser: Any, server: StudioServer, root: Path, width: int, scheme: str) -> None:
    page, errors = open_page(browser, server, viewport={"width": width, "height": 900}, color_scheme=scheme)
    for name, address in list_addresses(root).items():
        assert page.goto(address).status == 200, name
        check_page(page, name)
    assert errors == []
    page.context.close()


def test_everything_is_read_without_scripts(browser: Any, server: StudioServer, root: Path) -> None:
    page, _ = open_page(browser, server, java_script_enabled=False)
    for name, address in list_addresses(root).items():
        page.goto(address)
        assert page.locator("h1").first.is_visible(), name
        if name == "sheet":
            texts = [area.input_value() for area in page.locator(".sheet textarea").all()]
            assert '<b>bold</b> &amp; "quoted" <extra_id_0>' in texts
            assert page.locator(".related a").all_inner_texts() == ["mask"]
    page.context.close()


def test_captions_are_replaced_undone_and_edited_in_two_tabs(browser: Any, server: StudioServer, root: Path) -> None:
    data = root / "data" / "shapes"
    before = (data / "metadata.jsonl").read_bytes()
    page, errors = open_page(browser, server)
    sheet = list_addresses(root)["sheet"]
    page.goto(sheet)
    page.select_option("select[name=finding]", "caption_duplicate")
    with page.expect_navigation():
        page.click("button:has-text('Show')")
    assert page.locator(".sheet .sample").count() == 2
    page.click("text=Find and replace")
    page.fill("input[name=find]", "slowly")
    page.fill("input[name=replacement]", "quickly")
    with page.expect_navigation():
        page.click("button:has-text('Preview')")
    assert "2 captions" in page.locator("h1").inner_text()
    # Another tab edits one of the two in the meantime.
    other, other_errors = open_page(browser, server)
    other.goto(sheet)
    card = other.locator(".sample").nth(2)
    area = card.locator("textarea")
    edited = area.input_value() + ", by another tab"
    area.fill(edited)
    area.press("Control+Enter")
    card.locator(".said", has_text="saved").wait_for()
    with page.expect_navigation():
        page.click("button:has-text('Change')")
    assert "Nothing was written" in page.locator(".notes").inner_text()
    assert edited in CaptionTable.read(data).captions.values()
    page.goto(list_addresses(root)["change"])
    page.click("button:has-text('Change')")
    page.wait_for_url(f"**{sheet}")
    check_page(page, "undo")
    assert edited.replace("slowly", "quickly") in CaptionTable.read(data).captions.values()
    for _ in range(2):
        with page.expect_navigation():
            page.click("button:has-text('Undo')")
    assert (data / "metadata.jsonl").read_bytes() == before
    # Its refusal by the status 409 is a message of the browser's console.
    assert (other_errors, [text for text in errors if "409" not in text]) == ([], [])
    page.context.close()
    other.context.close()


def test_a_save_is_marked_and_a_run_planned_queued_and_stopped(browser: Any, server: StudioServer, root: Path) -> None:
    page, errors = open_page(browser, server)
    addresses = list_addresses(root)
    page.goto(addresses["work"])
    page.click("button:has-text('Mark as best')")
    page.locator("td b", has_text="best").wait_for()
    page.goto(addresses["form"])
    page.fill("input[name=name]", "next")
    page.fill("input[name='train.steps']", "200")
    # The form stays where it is when the command ends.
    before = page.locator("form.new").bounding_box()
    page.locator("summary", has_text="dit-lora doctor: nothing to report").wait_for()
    assert page.locator("form.new").bounding_box() == before
    with page.expect_navigation():
        page.click("button:has-text('Plan its memory')")
    page.locator(".memory-bar", has_text="fits: 17.6 of 24 GiB").wait_for()
    assert page.input_value("input[name='train.steps']") == "200"
    check_page(page, "planned")
    for name in ("next", "after", "last"):
        page.goto(addresses["form"])
        page.fill("input[name=name]", name)
        page.click("button:has-text('Start')")
        page.wait_for_url("**/jobs")
    page.locator(".job", has_text="step 12 of 200").wait_for()
    check_page(page, "queue")
    assert page.locator(".pill", has_text="waiting").count() == 2
    for _ in range(2):
        with page.expect_navigation():
            page.locator("button:has-text('Remove')").last.click()
    page.click("button:has-text('Stop')")
    # It is stopping until its process has ended.
    page.locator(".pill", has_text="stopped").nth(2).wait_for()
    assert errors == []
    page.context.close()


def test_a_clip_opens_from_its_thumbnail(browser: Any, server: StudioServer, root: Path) -> None:
    page, _ = open_page(browser, server)
    sheet = list_addresses(root)["sheet"]
    page.goto(sheet)
    name = CaptionTable.read(root / "data" / "shapes").media[0]
    page.locator(f".picture[href='media/{quote(name)}']").click()
    page.wait_for_url(f"**{sheet}media/{quote(name)}")
    page.context.close()


def test_findings_come_into_a_page_that_was_shown_before_them(
    browser: Any, server: StudioServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_check, check_all_captions = Event(), CaptionEdits.check_all_captions

    def wait_and_check(edits: CaptionEdits, table: CaptionTable) -> Any:
        assert may_check.wait(60)
        return check_all_captions(edits, table)

    monkeypatch.setattr(CaptionEdits, "check_all_captions", wait_and_check)
    monkeypatch.setattr(caption_edits, "_MAX_AWAITED_FILES", 0)
    page, errors = open_page(browser, server)
    # Another trigger word is another check.
    page.goto(f"{list_addresses(root)['sheet']}?word=take")
    values = page.locator("#figures .value")
    assert values.all_inner_texts()[2:] == ["\u2026", "\u2026"]
    assert set(page.locator(".findings").all_inner_texts()) == {"being checked"}
    assert "Without JavaScript, load the page again" in page.locator(".notes").inner_text()
    assert page.locator("select[name=finding] option").all_inner_texts() == ["all", "any"]
    page.select_option("select[name=finding]", "any")
    page.locator(".sample textarea").first.fill("typed, and not saved")
    check_page(page, "being_checked")
    may_check.set()
    page.locator("#figures .value", has_text="done").wait_for()
    found, shown = values.all_inner_texts(), page.locator(".findings").all_inner_texts()
    assert (page.locator(".notes").count(), "being checked" in shown, found[2].isdigit()) == (0, False, True)
    assert page.locator("select[name=finding]").input_value() == "any"
    assert page.locator(".sample textarea").first.input_value() == "typed, and not saved"
    page.once("dialog", lambda dialog: dialog.accept())
    page.reload()
    assert (values.all_inner_texts(), page.locator(".findings").all_inner_texts()) == (found, shown)
    assert page.locator("select[name=finding] option").count() > 2
    assert errors == []
    page.context.close()
