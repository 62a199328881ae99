"""Links, pipes and devices in a run's folder: nothing private is read, nothing is waited for or written elsewhere."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dit_lora.errors import DitLoraError
from dit_lora.report.guard_page import write_guard_report
from dit_lora.report.run.files import OBJECT_FILES
from dit_lora.report.run.page import write_report

PRIVATE = "a-private-word"
FILES = (
    *("metrics.jsonl", "eval_loss.jsonl", "events.jsonl", "quarantine.jsonl", "run.lock"),
    *(f"{name}.json" for name in OBJECT_FILES),
    "samples/step_000010/prompt_00.mp4",
    "samples/step_000020/answers.json",
    "samples/references/prompt_0_0.jpg",
    "report.html",
)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = tmp_path / "private"
    path.write_text(json.dumps({"state": PRIVATE, "x": PRIVATE}) + "\n")
    return path


def a_link(path: Path, private: Path) -> None:
    path.symlink_to(private)


def a_pipe(path: Path, private: Path) -> None:
    os.mkfifo(path)


def a_sparse_file(path: Path, private: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.parametrize("plant", [a_link, a_pipe, a_sparse_file])
def test_a_report_reads_regular_files_of_the_folder_only(
    plant: Callable[[Path, Path], None], run_dir: Path, private: Path
) -> None:
    for name in FILES:
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        plant(path, private)
    page = write_report(run_dir)
    assert PRIVATE not in page.read_text()
    assert not page.is_symlink()
    assert PRIVATE in private.read_text()


@pytest.mark.parametrize("plant", [a_link, a_pipe, a_sparse_file])
def test_so_does_the_report_of_a_guard(plant: Callable[[Path, Path], None], tmp_path: Path, private: Path) -> None:
    folder = tmp_path / "guard"
    folder.mkdir()
    (folder / "events.jsonl").write_text('{"step": 1}\n')
    for name in ("guard.json", "statistics.jsonl", "last_good_step_1.safetensors"):
        plant(folder / name, private)
    try:
        page = write_guard_report(folder).read_text()
    except OSError as error:
        page = str(error)
    assert PRIVATE not in page


def test_a_config_that_is_a_link_or_a_pipe_is_one_line(run_dir: Path, private: Path) -> None:
    config = run_dir / "config.yaml"
    for plant in (a_link, a_pipe, a_sparse_file):
        config.unlink()
        plant(config, private)
        with pytest.raises(DitLoraError, match=r"cannot read .*config\.yaml") as error:
            write_report(run_dir)
        assert "\n" not in str(error.value)
        assert PRIVATE not in str(error.value)
