"""A run is reported while it goes on; a report that fails harms nothing, and the folder says how the run ended."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dit_lora.report.run import background, page


def test_reports_come_at_the_start_with_the_base_at_checkpoints_and_at_validation_and_may_fail(
    lora_main: Callable[[list[str]], None],
    smoke: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, reports = tmp_path / "run", []

    def write_run_page(reader: Any, **how: Any) -> Path:
        files = reader.read(how.get("state"))
        reports.append((how.get("state"), files.num_steps_taken, files.status["state"]))
        if how.get("state") == "running":
            raise ZeroDivisionError("a chart")
        return page.write_run_page(reader, **how)

    monkeypatch.setattr(background, "write_run_page", write_run_page)
    # One at a time, each at its step: a run of milliseconds would be over before the first.
    monkeypatch.setattr(background.BackgroundReporter, "update", _and_wait(background.BackgroundReporter.update))
    options = ["train.steps=6", "train.save_every=4", "validation.every=3", "guard.preflight=false"]
    lora_main([*smoke, *options, f"run.dir={run}"])
    assert reports == [("running", step, "running") for step in (0, 1, 3, 4, 6)] + [(None, 6, "finished")]
    output = capsys.readouterr().err
    assert output.count("warning: cannot write the report: ZeroDivisionError: a chart") == 1
    assert "or open report.html" in output
    assert json.loads((run / "status.json").read_text()) == {
        "state": "finished",
        "recipe": "cogvideox.yaml",
    }
    data = json.loads((run / "data.json").read_text())
    assert (data["samples"], data["rejected_count"], data["buckets"]) == (5, 0, None)
    assert (run / "adapter" / "pytorch_lora_weights.safetensors").exists()


def _and_wait(update: Callable[[Any], None]) -> Callable[[Any], None]:
    def waiting(reporting: Any) -> None:
        update(reporting)
        reporting._wait_for_job()

    return waiting
