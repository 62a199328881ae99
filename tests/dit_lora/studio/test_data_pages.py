"""The pages of data sets in the studio: which edits they take, which files they give, and an edit in a browser."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from bare_media import HOSTILE_CAPTION, write_captioned_folder, write_without_captions
from report_runs import write_run
from starlette.types import ASGIApp
from studio_client import StudioClient, ask, serving
from typer.testing import CliRunner

from dit_lora.cli.app import app as command
from dit_lora.config.catalog import find_packaged_files_root
from dit_lora.config.load import dump_recipe, load_recipe
from dit_lora.data.sources.caption_table import CaptionTable, lock_table
from dit_lora.environment.command_job import CommandJob
from dit_lora.report.captions.edits import CaptionEdits
from dit_lora.report.captions.page import compute_caption_version
from dit_lora.report.captions.rules import CaptionRules
from dit_lora.studio import jobs
from dit_lora.studio.app import build_app, list_pages
from dit_lora.studio.data_pages import DataPages
from dit_lora.studio.jobs import JobQueue
from dit_lora.studio.library import RunLibrary, compute_run_id

RECIPE = find_packaged_files_root() / "recipes" / "smoke" / "cogvideox.yaml"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_captioned_folder(tmp_path / "my clips")


@pytest.fixture
def app(folder: Path) -> ASGIApp:
    return build_app(list_pages(RunLibrary([folder]), CaptionRules(trigger="sks")))


@pytest.fixture
def data_path(folder: Path) -> str:
    return f"/data/{compute_run_id(folder)}/"


def test_an_edit_is_written_and_others_are_refused(app: ASGIApp, folder: Path, data_path: str) -> None:
    client, path = StudioClient(app), f"{data_path}caption"
    assert client.keys.page_token in client.get(data_path).text
    name = CaptionTable.read(folder).media[0]
    good = {"file": name, "caption": "a\nnew   sks one", "version": compute_caption_version("the same")}
    before = (folder / "metadata.jsonl").read_bytes()
    for status, values in (
        (400, {"file": name}),
        (400, {key: good[key] for key in good if key != "version"}),
        (409, {**good, "version": compute_caption_version("earlier")}),
        (422, {**good, "file": "../secret.mp4"}),
        (422, {**good, "file": "metadata.jsonl"}),
        (422, {**good, "caption": "  "}),
        (413, {**good, "caption": "x" * 2**21}),
    ):
        answer = client.write(path, **values)
        assert answer.status_code == status, values
        assert (folder / "metadata.jsonl").read_bytes() == before
        if status == 409:
            assert answer.json()["caption"] == "the same"
    answer = client.write(path, **good)
    version = compute_caption_version(good["caption"])
    state = {"caption": good["caption"], "version": version, "findings": [], "num_tokens": 4}
    assert (answer.status_code, answer.json()) == (200, state)
    assert CaptionTable.read(folder).captions[name] == good["caption"]


def test_an_audit_that_ends_while_the_page_is_made_is_asked_for_again(
    folder: Path, data_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the page would show the findings of before, and never ask for the new ones."""
    queue = JobQueue()
    job = CommandJob("1", ["audit"], tmp_path / "1.log", data_path, state="running")
    queue._jobs[job.job_id] = job
    client = StudioClient(build_app(DataPages(RunLibrary([folder]), queue).list_routes()))
    build_sheet = CaptionEdits.build_sheet

    def end_after_reading(*args: Any) -> Any:
        sheet = build_sheet(*args)
        job.state = "done"
        return replace(sheet, is_checked=True)

    monkeypatch.setattr(CaptionEdits, "build_sheet", end_after_reading)
    assert [" data-live" in client.get(data_path).text for _ in range(2)] == [True, False]


def test_media_of_the_folder_are_served_and_nothing_else(app: ASGIApp, folder: Path, data_path: str) -> None:
    client, media = StudioClient(app), f"{data_path}media/"
    name = CaptionTable.read(folder).media[0]
    original_bytes = (folder / name).read_bytes()
    answer = client.get(media + name)
    assert (answer.status_code, answer.content) == (200, original_bytes)
    answer = client.get(media + name, headers={"Range": "bytes=3-9"})
    assert (answer.status_code, answer.content) == (206, original_bytes[3:10])
    assert answer.headers["Content-Type"] == "video/mp4"
    (folder.parent / "secret.mp4").write_bytes(b"secret")
    (folder / "linked.mp4").symlink_to(folder.parent / "secret.mp4")
    (folder / "inside.mp4").symlink_to(folder / name)
    os.mkfifo(folder / "pipe.mp4")
    (folder / "caf\udce9 50%25 \n'\".mp4").write_bytes(original_bytes)
    (folder / "%2e%2e.png").write_bytes(b"a picture")
    with serving(app) as server:
        for status, path in (
            (404, "media/metadata.jsonl"),
            (404, "media/../secret.mp4"),
            (404, "media/%2e%2e/secret.mp4"),
            (404, "media/linked.mp4"),
            (404, "media/pipe.mp4"),
            (404, "media/"),
            (404, "x"),
            (404, name),
            (200, "media/inside.mp4"),
            (200, "media/caf%e9%2050%2525%20%0a%27%22.mp4"),
            (200, "media/%252e%252e.png"),
        ):
            found, body, _ = ask(server, data_path + path)
            assert found == status, path
            assert b"secret" not in body


def test_a_command_of_the_page_is_shown_on_it(app: ASGIApp, data_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.JobQueue, "_run", lambda *_: None)  # it stays waiting
    client = StudioClient(app)
    assert client.write(f"{data_path}audit").status_code == 303
    page = client.get(data_path)
    assert (page.status_code, ">waiting</span>" in page.text, "dit-lora audit" in page.text) == (200, True, True)


def test_captions_of_other_lists_are_shown_and_not_edited(
    app: ASGIApp, folder: Path, data_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, table = StudioClient(app), CaptionTable.read(folder)
    rows = "".join(f'{name},"a shape, number {number}"\n' for number, name in enumerate(table.media))
    (folder / "metadata.jsonl").unlink()
    (folder / "metadata.csv").write_text(f"file_name,text\n{rows}")
    page = client.get(data_path).text
    assert page.count("a shape, number ") >= len(table.media)
    assert "metadata.csv, which are only shown" in page
    assert page.count(" readonly>") == len(table.media)
    assert "Find and replace" not in page
    values = {"file": table.media[0], "caption": "mine", "version": compute_caption_version("a shape, number 0")}
    for path, body in (("caption", values), ("undo", {}), ("change", {"find": "shape"})):
        answer = client.write(data_path + path, **body)
        assert (answer.status_code, "captions in metadata.csv" in answer.text) == (422, True), path
    assert not (folder / "metadata.jsonl").exists()
    served: list[object] = []
    monkeypatch.setattr("dit_lora.studio.app.serve_until_interrupted", lambda *arguments: served.append(arguments))
    result = CliRunner().invoke(command, ["caption", str(folder), "--serve"])
    assert (result.exit_code, len(served)) == (0, 1), result.output
    # A list that cannot be read is a sentence, on a page for a browser's window.
    (folder / "metadata.csv").write_text("a,b\n1,2\n")
    answer = client.get(data_path, headers={"Accept": "text/html,*/*"})
    assert (answer.status_code, "no column for the clip" in answer.text, "<nav" in answer.text) == (400, True, True)


def test_masks_and_references_in_folders_of_their_own_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    for name in ("clips", "masks", "before"):
        write_without_captions(root / name, clips=2, stills=1)
    write_without_captions(tmp_path / "outside", clips=2, stills=1)
    odd_name = "caf\udce9 50%25 \n'\"<b>.png"
    for name in ("clips", "masks", "before"):
        (root / name / "stills" / "00_red_disc.png").rename(root / name / odd_name)
    names = CaptionTable.read(root / "clips").media
    assert odd_name in names
    run = write_run(root / "run")
    recipe: dict[str, Any] = yaml.safe_load(dump_recipe(load_recipe(RECIPE)))
    recipe["data"] |= {"path": str(root / "clips")}
    recipe["data"] |= {"mask_folder": str(root / "masks"), "reference_folders": [str(root / "before")]}
    monkeypatch.setattr("dit_lora.studio.data_pages.load_text_rules", lambda *_: CaptionRules())
    client = StudioClient(build_app(list_pages(RunLibrary([root]))))
    page = f"/data/{compute_run_id(root / 'clips')}/?recipe={compute_run_id(run)}"

    def show() -> str:
        (run / "config.yaml").write_text(json.dumps(recipe))
        answer = client.get(page)
        assert answer.status_code == 200
        return answer.text

    text = show()
    for role, folder in (("mask", "masks"), ("reference", "before")):
        assert text.count(f"<span>{role}</span>") == len(names)
        for name in names:
            address = f"/data/{compute_run_id(root / folder)}/thumbnail/{quote(os.fsencode(name))}"
            assert f'src="{address}"' in text
            assert client.get(address).headers["content-type"] == "image/jpeg"
    assert "<span>mask</span>" not in client.get(page.partition("?")[0]).text
    # Links and folders that the studio was not given are named, and not read.
    (root / "link").symlink_to(tmp_path / "outside")
    for outside in (tmp_path / "outside", root / "link", root / ".." / "outside"):
        recipe["data"]["mask_folder"] = str(outside)
        text = show()
        assert text.count("<span>mask</span>") == 0
        assert f"start the studio with their folders: {outside}" in text
    # A mask that is a link to another folder is not read, and a recipe that is a pipe is not waited for.
    recipe["data"]["mask_folder"] = str(root / "masks")
    (root / "masks" / names[0]).unlink()
    (root / "masks" / names[0]).symlink_to(tmp_path / "outside" / names[0])
    address = f"/data/{compute_run_id(root / 'masks')}/thumbnail/{quote(os.fsencode(names[0]))}"
    assert (address in show(), client.get(address).status_code) == (True, 404)
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    assert "<span>mask</span>" not in client.get(page).text
    (run / "config.yaml").unlink()
    # A recipe of other data, and one that cannot be read.
    recipe["data"]["path"] = str(root / "masks")
    assert "<span>reference</span>" not in show()
    recipe["data"]["path"] = 7
    assert "<span>reference</span>" not in show()


def test_a_folder_of_tars_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "00000.tar").write_bytes(b"")
    client = StudioClient(build_app(list_pages(RunLibrary([tmp_path]))))
    path = f"/data/{compute_run_id(tmp_path / 'tars')}/"
    assert path in client.get("/data").text
    answer = client.get(path)
    assert (answer.status_code, "tar files, whose captions lie in them" in answer.text) == (400, True)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_an_edit_in_a_browser_lands_in_the_file(app: ASGIApp, folder: Path, data_path: str) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = CaptionTable.read(folder).media
    with serving(app, data_path) as server, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(request.url))
        page.goto(server.url)
        cards = page.locator(".sample")
        sync_api.expect(cards).to_have_count(5)
        # Three frames of the clip in a row.
        shape = (
            "document.querySelector('.picture img').decode().then(() => document.querySelector('img').naturalWidth)"
        )
        assert page.evaluate(shape) == 3 * 240
        assert cards.nth(2).locator("textarea").input_value() == HOSTILE_CAPTION
        card = cards.nth(0)
        assert card.locator("button").is_disabled()
        card.locator("textarea").fill("a sks square")
        card.locator("button").click()
        sync_api.expect(card.locator(".said")).to_have_text("saved")
        sync_api.expect(card.locator(".findings li")).to_have_count(0)
        # Changed elsewhere since: the page keeps the text, shows the file's, and replaces it if asked again.
        with lock_table(folder) as table:
            table.write_captions({names[0]: "by another editor"})
        card.locator("textarea").fill("mine sks")
        card.locator("button").click()
        sync_api.expect(card.locator(".now pre")).to_have_text("by another editor")
        assert card.locator("textarea").input_value() == "mine sks"
        card.locator("button").click()
        sync_api.expect(card.locator(".now")).to_be_hidden()
        # By keys; and what cannot be trained on is refused, and still to be saved.
        second_textarea, second_count = cards.nth(4).locator("textarea"), cards.nth(4).locator(".row .count")
        old_count = second_count.inner_text()
        second_textarea.fill("a still")
        second_textarea.press("Control+Enter")
        sync_api.expect(cards.nth(4).locator(".findings .code")).to_have_text("trigger_missing")
        new_count = second_count.inner_text()
        cards.nth(3).locator("textarea").fill("")
        cards.nth(3).locator("button").click()
        sync_api.expect(cards.nth(3).locator(".said")).to_have_text("not saved: its caption is empty")
        assert cards.nth(3).locator("button").is_enabled()
        assert page.evaluate("window.hit") is None
        page.on("dialog", lambda dialog: dialog.accept())
        page.reload()
        assert old_count != new_count == second_count.inner_text()
        assert errors == []
        browser.close()
    captions = CaptionTable.read(folder).captions
    assert (captions[names[0]], captions[names[4]]) == ("mine sks", "a still")
    assert captions[names[3]] == "a sks dog"
