"""Files that grow, are truncated or are rewritten continue from the last position, with the result of a full read."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from report_runs import metrics_line, write_lines

from dit_lora.report.charts import heat_map
from dit_lora.report.charts.heat_map import ModuleHistory, build_heat_maps
from dit_lora.report.run.files import RunReader
from dit_lora.report.run.history import JsonLinesReader, MetricColumns


def given(tail: JsonLinesReader) -> list[Any]:
    return [line["n"] for line in tail.read_new_lines()]


def test_lines_come_once_and_a_half_written_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = JsonLinesReader(path)
    assert not tail.reset_if_replaced()
    assert given(tail) == []
    path.write_text('{"n": 1}\n{"n": 2}\n{"n"')
    assert not tail.reset_if_replaced()
    assert given(tail) == [1, 2]
    assert tail.is_last_line_incomplete
    with path.open("a") as file:
        file.write(': 3}\n[4]\n{"n": 5}\n')
    assert not tail.reset_if_replaced()
    assert given(tail) == [3, 5]
    assert not tail.is_last_line_incomplete
    assert tail.damaged_lines == [4]
    assert given(tail) == []


@pytest.mark.parametrize("text", ['{"n": 7}\n', '{"n": 7}\n{"n": 8}\n{"n": 9}\n', ""])
def test_a_file_that_was_written_anew_is_read_from_its_beginning(tmp_path: Path, text: str) -> None:
    """Shorter, longer or empty: what a rollback or a resumed run leaves."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n')
    tail = JsonLinesReader(path)
    assert given(tail) == [1, 2]
    path.write_text(text)
    assert tail.reset_if_replaced()
    assert given(tail) == [json.loads(line)["n"] for line in text.splitlines()]


def test_a_reader_that_goes_on_finds_what_a_new_one_finds(run_dir: Path) -> None:
    path, reader = run_dir / "metrics.jsonl", RunReader(run_dir)
    reader.read()
    for last_step, first_step in (
        (25, 1),
        (12, 1),
        (30, 9),
    ):  # it grew, was rolled back, and repeats steps
        write_lines(path, [metrics_line(step) for step in range(1, 13)])
        with path.open("a") as file:
            for step in range(first_step, last_step + 1):
                file.write(json.dumps(metrics_line(step, loss=last_step + step / 8)) + "\n")
        continued_run, fresh_run = reader.read(), RunReader(run_dir).read()
        assert list(continued_run.metrics.steps) == list(range(1, last_step + 1))
        assert repr(continued_run.metrics.columns) == repr(fresh_run.metrics.columns)  # NaN and all
        assert continued_run.eval_losses == fresh_run.eval_losses


def test_the_fingerprint_changes_with_every_file_that_is_shown(run_dir: Path) -> None:
    reader = RunReader(run_dir)
    fingerprints = {reader.compute_fingerprint()}
    for name in (
        "metrics.jsonl",
        "events.jsonl",
        "verification.json",
        "samples/step_000030/prompt_00.png",
    ):
        path = run_dir / name
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write("{}\n")
        fingerprints.add(reader.compute_fingerprint())
    (run_dir / "report.html").write_text("")
    assert reader.compute_fingerprint() in fingerprints
    assert len(fingerprints) == 5


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"step": -1},
        {"step": 10**30},
        {"step": True},
        {"step": 3, "loss": 10**400, "grad_norm": "x", "seconds": None, "lr_groups": [1]},
        {"step": 3, "modules": {"a": 3, "b": {"grad_norm": "NaN"}}},
        {"step": 3, "lr_groups": {str(i): 1.0 for i in range(5000)}},
    ],
)
def test_odd_lines_cost_no_more_than_themselves(line: dict[str, Any]) -> None:
    metrics = MetricColumns()
    for text_line in (metrics_line(1), metrics_line(2), line, metrics_line(4)):
        metrics.add_line(text_line)
    assert metrics.steps[-1] == 4
    assert metrics.get_metric_column("loss")[-1] == 1.8
    assert all(len(column) == len(metrics.steps) for column in metrics.columns.values())
    assert len(metrics.columns) < 60


def modules(step: int) -> dict[str, Any]:
    return {
        "blocks.0.to_q": {"grad_norm": 3.0 * step, "update_ratio": 0.5, "abs_max": 2.0},
        "blocks.0.to_k": {"grad_norm": 4.0 * step, "update_ratio": 0.25, "abs_max": None},
        "blocks.1.to_q": {"grad_norm": 0.0},
        "proj_out": {"abs_max": 7.0},
    }


def test_modules_are_joined_by_block_and_by_layer() -> None:
    history = ModuleHistory()
    history.add_step(10, modules(1))
    [block], [layer] = history.by_block, history.by_layer
    assert block["blocks.0"] == {"grad_norm": 5.0, "update_ratio": 0.5, "abs_max": math.inf}
    assert layer["blocks.*.to_q"] == {"grad_norm": 3.0, "update_ratio": 0.5, "abs_max": 2.0}
    assert block["proj_out"] == layer["proj_out"] == {"abs_max": 7.0}


def test_many_steps_are_thinned_evenly_and_a_rollback_forgets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heat_map, "MAX_STEPS", 8)
    history = ModuleHistory()
    for step in range(1, 101):
        history.add_step(step, modules(step))
    gaps = {b - a for a, b in zip(history.steps, history.steps[1:], strict=False)}
    assert len(gaps) == 1
    assert 4 <= len(history.steps) <= 8
    history.drop_steps_from(50)
    assert history.steps[-1] < 50
    assert len(history.by_block) == len(history.by_layer) == len(history.steps)


def test_a_map_has_a_value_for_each_row_and_step() -> None:
    history = ModuleHistory()
    for step in (10, 20, 40):
        history.add_step(step, modules(step))
    history.add_step(50, {"blocks.1.to_q": {"grad_norm": 2.0}})
    maps = {(entry.grouping, entry.statistic): entry for entry in build_heat_maps(history)}
    assert len(maps) == 6
    norms = maps["by block", "gradient norm"]
    assert norms.steps == [10, 20, 40, 50]
    assert norms.rows == ["blocks.0", "blocks.1"]
    assert norms.values == [[50.0, 100.0, 200.0, None], [0.0, 0.0, 0.0, 2.0]]
    outputs = maps["by block", "largest output"]
    assert outputs.values[0] == ["not finite"] * 3 + [None]
