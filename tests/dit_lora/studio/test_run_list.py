"""The list of runs: what each is doing, whatever state its files are in, and quickly."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from report_runs import metrics_line, write_lines, write_run
from starlette.types import ASGIApp
from studio_client import StudioClient, serving

from dit_lora.report.run.overview import RunOverview, format_time_left, read_overview
from dit_lora.studio.app import build_app, list_pages
from dit_lora.studio.library import RunLibrary, compute_run_id

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two runs, one of them in a nested folder, and a folder without a run."""
    root = tmp_path / "runs"
    (root / "more").mkdir(parents=True)
    (root / "notes").mkdir()
    write_run(root / "kitten")
    write_run(root / "more" / '50% "dogs" <b>')
    return root


@pytest.fixture
def app(root: Path) -> ASGIApp:
    return build_app(list_pages(RunLibrary([root])))


def read_row(folder: Path) -> RunOverview:
    return read_overview("id", folder, folder.name)


def test_a_row_says_what_the_run_is_doing(run_dir: Path) -> None:
    row = read_row(run_dir)
    assert (row.state, row.step, row.max_steps, row.time_left) == ("interrupted", 20, 40, "")
    assert row.eval_losses == [2.5, 2.0]
    assert row.sparkline_points == "0.0,2.0 120.0,30.0"
    assert (row.memory, row.guard, row.notes) == ("3.75 GiB", "no step lost", [])
    assert row.sample == "samples/step_000020/prompt_00.mp4"
    # It goes on: the state is that of the last output, and a step takes 0.25 s.
    (run_dir / "status.json").write_text('{"state": "running"}')
    row = read_row(run_dir)
    assert (row.state, row.time_left) == ("running", "less than a minute")
    old = time.time() - 3600
    for file in ("metrics.jsonl", "status.json", "config.yaml"):
        os.utime(run_dir / file, (old, old))
    assert read_row(run_dir).state == "not finished, no longer running"
    events: list[dict[str, Any]] = [{"step": 3, "action": "skip", "sample_ids": ["bad.mp4"]}]
    write_lines(run_dir / "events.jsonl", events)
    assert read_row(run_dir).guard == "1 step was repeated without bad.mp4"
    (run_dir / "status.json").write_text('{"state": "stopped"}')
    assert (read_row(run_dir).guard, read_row(run_dir).guard_color) == ("stopped it", "reject")


@pytest.mark.parametrize(
    ("seconds", "text"), [(12, "less than a minute"), (600, "10 min"), (7500, "2 h 5 min"), (200_000, "2 d 7 h")]
)
def test_time_left_has_two_units(seconds: float, text: str) -> None:
    assert format_time_left(seconds) == text


def test_torn_and_old_files_cost_their_part_only(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    (run_dir / "status.json").write_text('{"state": "fini')
    (run_dir / "eval_loss.jsonl").write_text(
        '{"step": 0, "eval_loss": "NaN"}\nnothing\n{"step": 5, "eval_loss": 1.5}\n'
    )
    row = read_row(run_dir)
    assert row.step == 20
    assert row.notes == ["status.json is not a JSON object and is ignored."]
    assert (row.sparkline_points, row.last_loss) == ("", "1.500")
    # Of a version that wrote the losses under another name, and no status.
    (run_dir / "status.json").unlink()
    (run_dir / "eval_loss.jsonl").unlink()
    write_lines(run_dir / "held_out.jsonl", [{"step": 0, "held_out_loss": 3.0}, {"step": 10, "held_out_loss": 1.0}])
    assert read_row(run_dir).eval_losses == [3.0, 1.0]
    for name in ("metrics.jsonl", "config.yaml"):
        (run_dir / name).unlink()
    (run_dir / "metrics.jsonl").symlink_to(run_dir / "held_out.jsonl")
    os.mkfifo(run_dir / "status.json")
    row = read_row(run_dir)
    assert (row.step, row.max_steps) == (0, None)
    assert "Cannot read metrics.jsonl: is a link, and links are not followed." in row.notes
    assert "Cannot read status.json: is not a regular file." in row.notes


def test_the_steps_are_those_of_the_recipe_that_runs_write(run_dir: Path) -> None:
    config = "data:\n  steps: 7\ntrain:\n  # steps: 8\n  batch_size: 2\n  nested:\n    steps: 9\n  steps: 40\nx:\n"
    (run_dir / "config.yaml").write_text(config)
    assert read_row(run_dir).max_steps == 40
    (run_dir / "config.yaml").write_text("data:\n  steps: 7\ntrain:\n  batch_size: 2\nother:\n  steps: 8\n")
    assert read_row(run_dir).max_steps is None


def test_every_run_below_the_folders_is_listed_and_no_link_followed(app: ASGIApp, root: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "elsewhere")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    client = StudioClient(app)
    page = client.get("/").text
    assert page.count("data-key=") == 2
    assert "linked" not in page
    assert "more/50% &#34;dogs&#34; &lt;b&gt;</a>" in page
    for run_id in (compute_run_id(root / "kitten"), compute_run_id(root / "more" / '50% "dogs" <b>')):
        assert client.get(f"/runs/{run_id}/").status_code == 200
    assert client.get(f"/runs/{compute_run_id(root / 'linked')}/").status_code == 404
    for path, kind in (("/static/studio.css", "text/css"), ("/static/studio.js", "text/javascript")):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, kind)
    assert client.get("/static/page.html").status_code == 404
    assert "<script>" not in page
    assert "style=" not in page
    shutil.rmtree(root / "kitten")
    assert client.get("/").text.count("data-key=") == 1
    shutil.rmtree(root)
    assert "Found no runs below" in client.get("/").text


def test_two_hundred_runs_are_listed_in_half_a_second(tmp_path: Path) -> None:
    template = write_run(tmp_path / "template")
    write_lines(template / "metrics.jsonl", [metrics_line(step) for step in range(1, 301)])
    sample = Path("samples") / "step_000020" / "prompt_00.mp4"
    for number in range(200):
        folder = tmp_path / "runs" / f"run_{number:03d}"
        (folder / sample).parent.mkdir(parents=True)
        for name in ("config.yaml", "metrics.jsonl", "eval_loss.jsonl", "status.json", sample):
            os.link(template / name, folder / name)
    client = StudioClient(build_app(list_pages(RunLibrary([tmp_path / "runs"]))))
    client.get("/static/studio.css")
    begin = time.process_time()
    page = client.get("/").text
    seconds = time.process_time() - begin
    assert page.count("data-key=") == 200
    assert seconds < 0.5 * 4  # with room for a busy machine


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_the_list_follows_its_runs_in_a_browser(app: ASGIApp, root: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with serving(app) as server, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(server.url)
        sync_api.expect(page.locator(".run")).to_have_count(2)
        boxes = page.locator("[type=checkbox]")
        boxes.nth(1).check()
        row = page.locator(f"[data-key='{compute_run_id(root / 'kitten')}']")
        with (root / "kitten" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_line(21)) + "\n")
        write_run(root / "new")
        sync_api.expect(page.locator(".run")).to_have_count(3)
        sync_api.expect(row.locator(".progress p")).to_have_text("step 21 of 40")
        sync_api.expect(page.locator("#live")).to_have_text("live")
        assert page.locator(":checked").count() == 1
        page.locator(".run h2 a").first.click()
        sync_api.expect(page.locator("h1")).to_have_text("new")
        assert errors == []
        browser.close()
