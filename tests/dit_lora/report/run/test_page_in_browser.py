"""The report in a browser: nothing fetched, no error, charts that draw and answer, videos that play together."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from report_runs import metrics_line, write_lines, write_run
from studio_browser import CHROMIUM, start_browser
from studio_client import serving

from dit_lora.data.audit.finding import AuditedSample, Finding
from dit_lora.data.audit.summary import compute_totals
from dit_lora.data.media.video import write_video
from dit_lora.report.audit.page import write_audit_page
from dit_lora.report.run.page import write_report
from dit_lora.studio.app import build_app
from dit_lora.studio.library import RunLibrary, compute_run_id
from dit_lora.studio.run_pages import RunPages
from dit_lora.studio.server import StudioServer

VIDEOS = "[...document.querySelectorAll('.pair figure:not([hidden]) video')]"
INK = """(canvas) => {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((value, index) => index % 4 === 3 && value > 200).length;
}"""
"""Opaque pixels of a canvas."""
HOSTILE = '</script><img src=x onerror="window.hit=1"><script>window.hit=1</script>'

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with start_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with videos of two seconds, an image, events and statistics; texts that would like to be markup."""
    folder = write_run(tmp_path_factory.mktemp("run") / "kitten-run")
    lines = [metrics_line(step) for step in range(1, 21)]
    for line in lines[4::5]:
        line["modules"] = {f"blocks.{i}.{HOSTILE}": {"grad_norm": 0.1 * i} for i in range(9)}
    write_lines(folder / "metrics.jsonl", lines)
    event = {
        "step": 10,
        "kind": "spike",
        "action": "report",
        "verdict": {"cause": "data", "words": HOSTILE},
    }
    write_lines(folder / "events.jsonl", [event])
    generator = torch.Generator().manual_seed(0)
    for step in (0, 10, 20):
        video = torch.randint(0, 255, (16, 64, 96, 3), dtype=torch.uint8, generator=generator)
        write_video(folder / "samples" / f"step_{step:06d}" / "prompt_00.mp4", video, 8)
    (folder / "samples" / "references").mkdir()
    Image.new("RGB", (64, 64), "navy").save(folder / "samples" / "references" / "prompt_00_1.jpg")
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> str:
    return write_report(folder).as_uri()


class Opened:
    """A page, what it said and what it asked for."""

    def __init__(self, browser: Any, url: str, **how: Any) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        how = {"viewport": {"width": 1280, "height": 900}, **how}
        self.page = browser.new_context(**how).new_page()
        self.page.set_default_timeout(100_000)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    def wait_for(self, condition: str, seconds: float = 100) -> None:
        """Until it holds; the page's policy forbids the polling that Playwright itself would do in it."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"never: {condition}"
            self.page.wait_for_timeout(30)

    def is_quiet(self, own: str) -> bool:
        """Whether it printed nothing and requested only its own address."""
        foreign_urls = [url for url in self.asked if not url.startswith((own, "data:"))]
        assert self.said == []
        assert foreign_urls == []
        assert self.page.evaluate("window.hit") is None
        return True


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_reads_on_a_phone_in_both_schemes_without_a_word_to_the_network(
    browser: Any, report: str, scheme: str
) -> None:
    opened_page = Opened(browser, report, viewport={"width": 360, "height": 780}, color_scheme=scheme)
    page = opened_page.page
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    inks = page.evaluate(f"[...document.querySelectorAll('.curves canvas')].map({INK})")
    assert len(inks) >= 7
    assert min(inks) > 500, "pixels that lines left on each canvas"
    assert page.evaluate("[...document.images].every((one) => one.naturalWidth > 0)")
    colors = page.evaluate(
        "['--ink', '--soft', '--c0', '--c1', '--c2', '--c3', '--c4', '--c5', "
        "'--ok', '--warn', '--reject', '--mark', '--card']"
        ".map((name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim())"
    )
    *inks, card = map(luminance, colors)
    assert (card > 0.5) == (scheme == "light")
    contrasts = [(max(card, ink) + 0.05) / (min(card, ink) + 0.05) for ink in inks]
    assert min(contrasts) > 4.5, contrasts
    assert opened_page.is_quiet(report)


def luminance(color: str) -> float:
    """WCAG's relative luminance of #rrggbb."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_two_steps_play_together_and_can_be_chosen(browser: Any, report: str) -> None:
    opened_page = Opened(browser, report)
    page = opened_page.page
    page.select_option("#mode", "two")
    if not page.evaluate("document.createElement('video').canPlayType('video/mp4; codecs=\"avc1.42E01E\"')"):
        pytest.skip("this Chromium has no H.264")
    opened_page.wait_for(f"{VIDEOS}.length === 2 && {VIDEOS}.every((one) => one.currentTime > 0.3)")
    times = page.evaluate(f"{VIDEOS}.map((one) => one.currentTime)")
    assert abs(times[0] - times[1]) < 0.3
    page.click("#play")
    assert page.evaluate(f"{VIDEOS}.every((one) => one.paused)")
    page.focus("#seek")  # as who drags it; else a playing video moves it
    page.evaluate("document.getElementById('seek').value = 500")
    page.dispatch_event("#seek", "input")
    opened_page.wait_for(f"{VIDEOS}.every((one) => Math.abs(one.currentTime - one.duration / 2) < 0.05)")
    page.select_option("#right", "10")
    script = "[...document.querySelectorAll('.pair figure:not([hidden])')].map((one) => one.dataset.step)"
    assert page.evaluate(script) == ["0", "10"]
    page.select_option("#mode", "slider")
    boxes = [figure.bounding_box() for figure in page.query_selector_all(".pair figure:not([hidden])")]
    assert boxes[0] == boxes[1]
    page.select_option("#mode", "film")
    assert page.evaluate(script) == ["0", "10", "20"]


def test_a_filmstrip_is_shown_first_and_a_click_shows_a_tile_at_full_size(browser: Any, report: str) -> None:
    opened_page = Opened(browser, report)
    page = opened_page.page
    tiles = page.locator(".film .pair .tile")
    boxes = [tile.bounding_box() for tile in tiles.all()]
    assert len(boxes) == 3
    assert len({box["y"] for box in boxes}) == 1, "one row"
    assert page.locator(".tile video[controls]").count() == 0
    assert not page.locator("#left").is_visible(), "steps are chosen in the other views only"
    tiles.nth(1).click()
    large = page.locator("dialog[open] video[controls]")
    assert large.bounding_box()["width"] > 3 * boxes[1]["width"]
    assert page.locator("dialog .title").inner_text().startswith("after step 10: ")
    page.keyboard.press("ArrowRight")
    assert page.locator("dialog .title").inner_text().startswith("after step 20: ")
    page.keyboard.press("ArrowRight")  # there is no further one
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    assert page.evaluate("document.activeElement.closest('figure').dataset.step") == "20"
    assert opened_page.is_quiet(report)


def test_the_badge_is_amber_after_a_lost_step_and_leads_to_the_guards_events(browser: Any, folder: Path) -> None:
    lost = write_run(folder.parent / "lost")
    event = {"step": 3, "kind": "non_finite_loss", "action": "skip", "sample_ids": ["horse.mp4"]}
    write_lines(lost / "events.jsonl", [event])
    colors = {}
    for run in (lost, write_run(folder.parent / "sound")):
        page = Opened(browser, write_report(run).as_uri()).page
        badge = page.locator("#guard-badge")
        colors[badge.inner_text()] = badge.evaluate("(badge) => getComputedStyle(badge).color")
    assert colors == {
        "guard: 1 step was repeated without horse.mp4": "rgb(160, 95, 0)",
        "guard: no step failed": "rgb(43, 122, 58)",
    }
    page.click("#guard-badge")
    assert page.evaluate("location.hash") == "#guard"


def test_charts_can_be_drawn_over_epochs_and_time(browser: Any, folder: Path) -> None:
    run = write_run(folder.parent / "axes")
    (run / "data.json").write_text('{"samples": 10}')
    opened_page = Opened(browser, write_report(run).as_uri())
    page = opened_page.page
    legend_table = page.locator(".u-legend").first
    page.locator(".u-over").first.scroll_into_view_if_needed()
    texts = {}
    for number, name in enumerate(page.locator("#axis option").all_inner_texts()):
        page.select_option("#axis", str(number))
        box = page.locator(".u-over").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 50)
        texts[name] = legend(legend_table)
    assert texts["step"].startswith("step 20 training 1.1 eval 2 ")
    assert texts["epoch"].startswith("epoch 4 training 1.1 eval 2 ")  # 20 steps of 2 of 10 samples
    # The first step takes 9 seconds, and each of the others a quarter.
    assert texts["seconds in steps"].startswith("seconds in steps 13.75 training 1.1 eval 2 ")
    page.mouse.move(box["x"] + 1, box["y"] + 50)
    assert legend(legend_table).startswith("seconds in steps 0 ")
    assert opened_page.is_quiet(run.as_uri())


def test_a_link_to_a_folded_section_unfolds_it(browser: Any, report: str) -> None:
    page = Opened(browser, report).page
    assert not page.locator("#fold-recipe").get_attribute("open")
    page.click("nav a[href='#recipe']")
    assert page.locator("#fold-recipe").evaluate("(fold) => fold.open")


def test_charts_and_heat_maps_tell_their_values_to_pointer_and_keyboard(browser: Any, report: str) -> None:
    opened_page = Opened(browser, report)
    page = opened_page.page
    chart = page.locator(".curves").first
    legend_table, tip, plot = (
        chart.locator(".u-legend"),
        chart.locator(".tip"),
        chart.locator(".plot"),
    )
    assert legend(legend_table) == "step 20 training 1.1 eval 2 each step 1"  # the last ones
    assert not tip.is_visible()
    plot.scroll_into_view_if_needed()
    box = chart.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    # The means of steps 6 to 10, and step 10.
    assert legend(legend_table) == "step 10 training 1.6 eval 2.5 at step 0 each step 1.5"
    assert HOSTILE[:20] in tip.inner_text()
    plot.focus()
    page.keyboard.press("ArrowRight")
    assert "training 1.55" in legend(legend_table)
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.evaluate("document.getElementById('smoothing').value = 0")
    page.dispatch_event("#smoothing", "input")
    assert page.inner_text("#smoothing-is") == "none"
    assert legend(page.locator(".u-legend").first) == "step 20 training 1 eval 2"
    page.click("nav a[href='#modules']")  # it is folded
    heat = page.locator(".heat-map:not([hidden]) .heat")
    heat.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert page.inner_text(".heat-map:not([hidden]) output") == "blocks.2, step 10: 0.2"
    page.select_option("#heat-grouping", "by layer")
    assert "by layer" in page.inner_text(".heat-map:not([hidden]) figcaption")
    assert opened_page.is_quiet(report)


def legend(locator: Any) -> str:
    """The legend text under a chart, in visual order."""
    script = """(legend) => [...legend.querySelectorAll('tr')]
      .sort((a, b) => getComputedStyle(a).order - getComputedStyle(b).order)
      .map((row) => [...row.children].map((cell) => cell.innerText).join(' ')).join(' ')"""
    return str(locator.evaluate(script))


def test_a_drag_zooms_every_chart_and_a_double_click_shows_the_whole_run(browser: Any, report: str) -> None:
    opened_page = Opened(browser, report)
    page = opened_page.page
    chart_overlay = page.locator(".u-over").first
    chart_overlay.scroll_into_view_if_needed()
    box = chart_overlay.bounding_box()
    y = box["y"] + 60

    def first_step(chart: int) -> str:
        """What the left end of a chart is."""
        overlay_bounds = page.locator(".u-over").nth(chart).bounding_box()
        page.mouse.move(overlay_bounds["x"] + 1, overlay_bounds["y"] + 30)
        return legend(page.locator(".u-legend").nth(chart)).split(" ")[1]

    assert (first_step(0), first_step(1)) == ("0", "1")
    page.mouse.move(box["x"] + box["width"] / 2, y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], y)
    page.mouse.up()
    assert (first_step(0), first_step(1)) == ("10", "10")
    page.mouse.dblclick(box["x"] + 30, y)
    assert (first_step(0), first_step(1)) == ("0", "1")
    assert opened_page.is_quiet(report)


def test_the_audits_sheet_is_filtered_by_severity_finding_and_name(browser: Any, tmp_path: Path) -> None:
    black, cut = Finding("black", "all black", "reject", "remove it"), Finding("hard_cut", "a cut", "warn", "split it")
    findings = {"a.mp4": (black, cut), "b.mp4": (cut,), "c.mp4": (), "cb.mp4": ()}
    samples = [AuditedSample(file, found) for file, found in findings.items()]
    path = write_audit_page(tmp_path / "audit.html", samples, title="clips", totals=compute_totals(samples))
    opened_page = Opened(browser, path.as_uri(), viewport={"width": 390, "height": 800})
    page = opened_page.page

    def list_shown() -> list[str]:
        return [card.get_attribute("data-name") for card in page.locator("article:visible").all()]

    assert list_shown() == ["a.mp4", "b.mp4", "c.mp4", "cb.mp4"]
    page.select_option("#level", "ok")
    assert list_shown() == ["c.mp4", "cb.mp4"]
    page.fill("#name", "B")
    assert list_shown() == ["cb.mp4"]
    assert page.inner_text("#count") == "1 of 4 shown"
    page.click("a[data-code=hard_cut]")  # in the table of findings
    assert list_shown() == ["a.mp4", "b.mp4"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened_page.is_quiet(path.as_uri())


def test_a_heat_map_has_the_colours_of_its_values(browser: Any, folder: Path) -> None:
    """Zero has its own, what nobody measured none, and the others get lighter with the value."""
    lines = [metrics_line(step) for step in (10, 20, 30)]
    lines[0]["modules"] = {f"blocks.{i}": {"grad_norm": 10.0**i} for i in range(3)}
    lines[1]["modules"] = {"blocks.0": {"grad_norm": 0.0}, "blocks.1": {"grad_norm": None}}
    colored = write_run(folder.parent / "colored")
    write_lines(colored / "metrics.jsonl", lines)
    opened_page = Opened(browser, write_report(colored).as_uri())
    script = "(canvas) => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
    data = opened_page.page.locator(".heat canvas").first.evaluate(script)
    pixels = [data[offset : offset + 4] for offset in range(0, len(data), 4)]
    low, zero, middle, bad, high, none = pixels
    assert sum(low[:3]) < sum(middle[:3]) < sum(high[:3])
    assert zero == [128, 128, 128, 255]
    assert bad == [226, 30, 110, 255]
    assert none == [0, 0, 0, 0]


def test_without_scripts_the_page_says_where_the_curves_are(browser: Any, report: str) -> None:
    opened_page = Opened(browser, report, java_script_enabled=False)
    text = opened_page.page.inner_text("body")
    assert "metrics.jsonl has the numbers" in text
    assert "Loss by timestep, at the end" in text
    assert "Steps" in text


@pytest.fixture
def server(folder: Path) -> Iterator[StudioServer]:
    app = build_app(RunPages(RunLibrary([folder])).list_routes())
    with serving(app, f"/runs/{compute_run_id(folder)}/") as server:
        yield server


def test_a_served_page_follows_the_run_and_keeps_what_was_chosen(
    browser: Any, folder: Path, server: StudioServer
) -> None:
    opened_page = Opened(browser, server.url)
    page = opened_page.page
    page.select_option("#mode", "two")
    page.select_option("#left", "10")
    page.evaluate("window.scrollTo(0, 700)")
    page.evaluate("document.querySelector('#samples').mine = true")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(21)) + "\n")
    opened_page.wait_for("document.querySelector('.figure .value').textContent === '21'")
    assert page.evaluate("window.scrollY") == 700
    assert page.input_value("#left") == "10"
    assert page.evaluate("document.querySelector('#samples').mine")  # unchanged: it plays on
    opened_page.wait_for(f"{VIDEOS}.every((one) => one.readyState > 1)")
    page.evaluate(f"{VIDEOS}[0].currentTime = 1.5")
    opened_page.wait_for(f"!{VIDEOS}[0].seeking")
    assert opened_page.is_quiet(server.url.partition("/runs/")[0])
