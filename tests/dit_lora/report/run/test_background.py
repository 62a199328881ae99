"""A report is written during training: training never waits for it, and its errors are only reported."""

import threading
from pathlib import Path
from typing import Any

import pytest

from dit_lora.report.run import background
from dit_lora.report.run.background import BackgroundReporter


def test_a_page_of_a_run_that_goes_on_links_its_samples_and_the_last_one_holds_them(
    run_dir: Path,
) -> None:
    messages: list[str] = []
    reporting = BackgroundReporter(run_dir, messages.append)
    reporting.update()
    reporting._wait_for_job()
    page = (run_dir / "report.html").read_text()
    assert "running" in page
    assert "data:video" not in page
    assert 'src="samples/step_000010/prompt_00.mp4"' in page
    assert reporting.finish() == run_dir / "report.html"
    page = (run_dir / "report.html").read_text()
    assert "interrupted" in page
    assert page.count("data:video") == 3
    assert messages == []


def test_training_waits_for_no_report_and_one_is_written_at_a_time(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_finish, states = threading.Event(), threading.Event(), []

    def write_run_page(reader: Any, **how: Any) -> Path:
        states.append(how.get("state"))
        has_begun.set()
        assert may_finish.wait(100)
        return run_dir / "report.html"

    monkeypatch.setattr(background, "write_run_page", write_run_page)
    reporting = BackgroundReporter(run_dir, pytest.fail)
    for _ in range(3):
        reporting.update()  # returns although none is done
    assert has_begun.wait(100)
    assert states == ["running"]
    may_finish.set()
    reporting.finish()
    assert states == ["running", None]


def test_an_error_of_any_kind_is_said_once_and_raised_never(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_run_page(reader: Any, **how: Any) -> Path:
        raise KeyError("loss")

    monkeypatch.setattr(background, "write_run_page", write_run_page)
    messages: list[str] = []
    reporting = BackgroundReporter(run_dir, messages.append)
    for _ in range(3):
        reporting.update()
        reporting._wait_for_job()
    assert messages == ["warning: cannot write the report: KeyError: 'loss'"]
    assert reporting.finish() is None
    assert len(messages) == 2  # of the last one again
    other_reporting = BackgroundReporter(run_dir, messages.append, writes=False)  # another rank's
    other_reporting.update()
    assert other_reporting.finish() is None
    assert len(messages) == 2
