"""Two to four runs side by side."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_runs import metrics_line, write_lines, write_run
from studio_client import StudioClient

from dit_lora.report.run.compare import list_differences, list_prompts
from dit_lora.report.run.files import RunReader
from dit_lora.studio.app import build_app, list_pages
from dit_lora.studio.library import RunLibrary, compute_run_id


def change_recipe(folder: Path, **sections: dict[str, Any]) -> None:
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for name, values in sections.items():
        config.setdefault(name, {}).update(values)
    path.write_text(yaml.safe_dump(config))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three runs: the second with another rank, prompts and steps, the third without anything but a recipe."""
    first, second, third = (tmp_path / "runs" / name for name in ("first", "second", "third"))
    first.parent.mkdir()
    write_run(first)
    write_run(second)
    change_recipe(first, validation={"prompts": ["a cat", "a dog"]})
    change_recipe(second, lora={"rank": 32}, optim={"lr": None}, validation={"prompts": ["a dog", "a cat"]})
    write_lines(second / "metrics.jsonl", [metrics_line(step, loss=1.0) for step in range(1, 1001)])
    shutil.rmtree(second / "samples" / "step_000020")
    shutil.copy(first / "samples/step_000010/prompt_00.mp4", first / "samples/step_000010/prompt_01.mp4")
    third.mkdir()
    shutil.copy(first / "config.yaml", third)
    return [first, second, third]


def get_address(folders: list[Path]) -> str:
    return "/compare?" + "&".join(f"run={compute_run_id(folder)}" for folder in folders)


def test_recipes_and_samples_are_compared_by_key_and_prompt(folders: list[Path]) -> None:
    runs = [RunReader(folder).read() for folder in folders[:2]]
    assert list_differences(runs) == [
        ("lora.rank", ["12", "32"]),
        ("validation.prompts", ["a cat\na dog", "a dog\na cat"]),
    ]
    assert list_prompts(runs, [10, 10]) == [
        ("a cat", ["samples/step_000010/prompt_00.mp4", ""]),
        ("a dog", ["samples/step_000010/prompt_01.mp4", "samples/step_000010/prompt_00.mp4"]),
    ]


def test_the_page_shows_the_last_common_step_and_curves_of_all(folders: list[Path]) -> None:
    client = StudioClient(build_app(list_pages(RunLibrary([folders[0].parent]))))
    page = client.get(get_address(folders[:2])).text
    assert re.findall(r"<option( selected)?>(\d+)", page) == [("", "0"), (" selected", "10"), ("", "20")]
    assert "No sample of this prompt." in page
    assert "Not every run has samples of step" not in page
    videos = re.findall('<video src="([^"]*)"', page)
    assert len(videos) == 3
    assert all(client.get(video).status_code == 200 for video in videos)
    assert page.count("<figcaption>") == 4 + 3  # a figure for each prompt and run, and the charts
    assert "step 1,000</text>" in page
    assert max(len(points.split()) for points in re.findall('points="([^"]*)"', page)) <= 320
    assert re.findall(r"<option( selected)?>(\d+)", client.get(f"{get_address(folders[:2])}&step=0").text)[0][0]
    # The third run has no step: the others' are shown, and it takes none of their place.
    page = client.get(get_address(folders)).text
    assert re.findall(r"<option selected>(\d+)", page) == ["20"]
    assert 'class="k1"' in page
    assert 'class="k2"' not in page


def test_without_a_common_step_after_0_each_run_shows_its_nearest(folders: list[Path]) -> None:
    (folders[1] / "samples" / "step_000010").rename(folders[1] / "samples" / "step_000004")
    client = StudioClient(build_app(list_pages(RunLibrary([folders[0].parent]))))
    page = client.get(get_address(folders[:2])).text
    assert re.findall(r"<option selected>(\d+)", page) == ["20"]
    assert "Not every run has samples of step 20." in page
    assert (", step 20</figcaption>" in page, ", step 4</figcaption>" in page) == (True, True)
    assert "step_000004/prompt_00.mp4" in page
    # Step 0 is shown if it is asked for.
    page = client.get(f"{get_address(folders[:2])}&step=0").text
    assert (page.count(", step 0</figcaption>") > 1, "Not every run" in page) == (True, False)


def test_one_run_or_too_many_and_unknown_ones_are_refused(folders: list[Path]) -> None:
    client = StudioClient(build_app(list_pages(RunLibrary([folders[0].parent]))))
    for address in ("/compare", get_address(folders[:1] * 3), "/compare?" + "&".join(f"run={n}" for n in range(5))):
        answer = client.get(address)
        assert answer.status_code == 400
        assert answer.text.startswith("choose 2 to 4 runs")
    answer = client.get(f"{get_address(folders[:2])}&run=0123")
    assert (answer.status_code, "no such run" in answer.text) == (404, True)
