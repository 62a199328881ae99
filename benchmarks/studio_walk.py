"""How long a new user takes from `pip install` to a trained LoRA of the demo, in the studio's pages.

    python -m benchmarks.studio_walk FOLDER [--steps 100]

In FOLDER, which must not exist: a fresh virtual environment with this checkout, then `dit-lora studio runs`, and a
browser that a script drives: open the link, New run, the demo, Make them, type a name, Start. No command is typed.
Without --steps the demo's recipe runs as it is shipped. Needs Playwright and Chromium; pages update every 3 s.
"""

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TORCH = "torch==2.13.0"  # the tested version
_TIMEOUT_S = 7200.0
_ROOT = Path(__file__).resolve().parents[1]


class PartTimes:
    """Prints the seconds since the last part ended."""

    def __init__(self) -> None:
        self._begin = self._last = time.monotonic()

    def end_part(self, description: str) -> None:
        now = time.monotonic()
        print(f"{now - self._last:8.1f}  {description}", flush=True)
        self._last = now

    def print_total(self) -> None:
        print(f"{self._last - self._begin:8.1f}  together", flush=True)


def list_user_environment() -> dict[str, str]:
    """This process's environment without what a developer sets."""
    return {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}


def install(folder: Path) -> None:
    """Make a virtual environment and install this checkout with the studio's extra."""
    # A copy: building leaves files in the folder that it builds.
    source = folder / "checkout"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=_ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(_ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    command = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", f"{source}[studio]", _TORCH]
    subprocess.run(command, env=list_user_environment(), check=True)


@contextmanager
def serving_studio(folder: Path) -> Iterator[str]:
    """Start `dit-lora studio runs` and yield the link that it prints."""
    (folder / "runs").mkdir()
    command = [folder / "venv/bin/dit-lora", "studio", "runs"]
    with subprocess.Popen(
        command, cwd=folder, env=list_user_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        match = re.search(r"http://\S+", process.stdout.readline())
        try:
            if match is None:
                raise SystemExit("the studio has printed no link")
            yield match[0]
        finally:
            process.terminate()


def wait_for_text(page: Any, text: str) -> None:
    """Wait until the newest command on a page has printed a text, or is in a state. Ends this script if it failed."""
    begin = time.monotonic()
    job = page.locator(".job").first
    while time.monotonic() - begin < _TIMEOUT_S:
        job_text = job.text_content()
        if re.search(text, job_text):
            return
        if re.match(r"\s*failed", job_text):
            raise SystemExit(f"a command has failed:\n{job_text}")
        time.sleep(0.5)
    raise SystemExit(f"no {text!r} after {_TIMEOUT_S:.0f} s:\n{job.text_content()}")


def walk(page: Any, link: str, times: PartTimes, steps: int | None) -> None:
    """From the link to the finished run."""
    page.set_default_timeout(_TIMEOUT_S * 1000)
    page.goto(link)
    page.locator("h1", has_text="Runs").wait_for()
    times.end_part("opens the link: the list of runs")
    page.click("nav >> text=New run")
    page.click("text=the demo")
    page.locator("button", has_text="Make them").wait_for()
    times.end_part("New run, the demo: the form")
    page.click("button:has-text('Make them')")
    page.locator(".job").first.wait_for()
    # Finished commands are not shown here; a failed one stays.
    while page.locator(".job").count():
        if failures := page.locator(".job", has_text=re.compile(r"^\s*failed")).all_inner_texts():
            raise SystemExit(f"a command has failed:\n{failures[0]}")
        time.sleep(0.5)
    times.end_part("Make them: model and clips are made")
    page.fill("input[name=name]", "moon")
    if steps is not None:
        page.fill("input[name='train.steps']", str(steps))
    page.click("button:has-text('Start')")
    page.wait_for_url("**/jobs")
    wait_for_text(page, r"process\w* on ")
    times.end_part("a name, Start: imports and launch")
    wait_for_text(page, r"step 0: eval loss")
    times.end_part("model is loaded, clips are encoded, first samples and loss")
    wait_for_text(page, r"^\s*done")
    times.end_part("training, samples, checks of the result")
    page.locator(".job a", has_text="its page").first.click()
    page.locator("h1", has_text="moon").wait_for()
    page.locator(".sample video, .sample img").first.wait_for()
    times.end_part("opens the run's report")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, help="instead of the recipe's, for a rehearsal")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True)
    sync_api = importlib.import_module("playwright.sync_api")
    times = PartTimes()
    install(folder)
    times.end_part("python -m venv, pip install")
    with serving_studio(folder) as link, sync_api.sync_playwright() as playwright:
        times.end_part("dit-lora studio runs: the link is printed")
        executable = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        walk(browser.new_page(), link, times, arguments.steps)
        browser.close()
    times.print_total()
    print(f"the LoRA: {next((folder / 'runs/moon/checkpoints').glob('step_*/pytorch_lora_weights.safetensors'))}")


if __name__ == "__main__":
    main()
