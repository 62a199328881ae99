"""Sections of the guard, the checks, the data and the modules as text, also for malformed files."""

import json
import time
from pathlib import Path
from typing import get_args

import pytest
from report_runs import HOSTILE, metrics_line, report, write_lines

from dit_lora.config.catalog import find_packaged_files_root
from dit_lora.config.load import dump_recipe, load_recipe
from dit_lora.guard.diagnosis import Cause
from dit_lora.report.run import files, words
from dit_lora.report.run.files import RunReader
from dit_lora.report.run.page import write_run_page
from dit_lora.report.run.recipe_diff import compare_with_shipped


def test_a_verdict_is_told_in_full_words_and_marked_on_the_curves(run_dir: Path) -> None:
    verdict = {
        "cause": "attention_backend",
        "words": "finite with flash off",
        "module": "blocks.3.attn",
        "op": "aten.bmm",
        "timesteps": [7, 900],
        "evidence": {"trail": ["a reaches 2e38", "b is Inf"]},
    }
    event = {"step": 8, "kind": "non_finite_gradient", "verdict": verdict, "action": "fallback"}
    write_lines(run_dir / "events.jsonl", [event])
    page = report(run_dir)
    text = page.section("Guard events")
    assert "attention_backend: an attention backend; the step is finite without it" in text
    assert "fallback: switched the component off for this run and repeated the step" in text
    assert "Op aten.bmm" in text
    assert "Timesteps 7, 900" in text
    assert "trail: a reaches 2e38 b is Inf" in text
    detail = "non-finite gradient, fallback: finite with flash off"
    assert page.data[0]["marks"] == [[8, detail]]
    assert "1 fallback" in page.text


@pytest.mark.parametrize("cause", get_args(Cause))
def test_every_cause_is_explained(cause: str) -> None:
    row = words.build_event_row({"step": 3, "action": "stop", "verdict": {"cause": cause}})
    assert dict(row.rows)["Cause"].startswith(f"{cause}: ")


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        (["a.mp4"], "skip: repeated the step without the sample"),
        ([], "skip: left the step out, because no sample is the cause"),
    ],
)
def test_a_skip_without_samples_leaves_the_step_out(samples: list[str], text: str) -> None:
    event = {"step": 3, "action": "skip", "sample_ids": samples, "verdict": {"cause": "step"}}
    assert dict(words.build_event_row(event).rows)["Action"] == text


def test_many_events_fold_and_the_earliest_are_counted(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "EVENTS", 30)
    events = [{"step": step, "kind": "spike", "action": "report"} for step in range(1, 41)]
    write_lines(run_dir / "events.jsonl", events)
    text = report(run_dir).section("Guard events")
    assert "10 earlier events are in events.jsonl" in text
    assert text.index("step 30 spike") < text.index("10 more") < text.index("step 31 spike")


def test_verification_quarantine_data_and_audit_are_shown(run_dir: Path) -> None:
    modules = [{"name": f"blocks.{i}.to_q", "norm": 0.5 * i, "relative": 0.01 * i} for i in range(30)]
    checks = {
        "keys": {"passed": True, "words": HOSTILE},
        "scale": {"passed": False, "words": "alpha lacks"},
    }
    record = {"adapter": "a", "passed": False, "checks": checks, "modules": modules}
    (run_dir / "verification.json").write_text(json.dumps(record))
    left_out_events = {
        "sample_id": HOSTILE,
        "from_epoch": 2,
        "to_epoch": None,
        "step": 3,
        "cause": "data",
        "reason": "NaN",
    }
    write_lines(run_dir / "quarantine.jsonl", [left_out_events])
    shape = {"frames": 9, "height": 32, "width": 48}
    bucket = {
        "shape": shape,
        "clips": 3,
        "samples": 4,
        "share": 1.0,
        "mean_crop": 0.1,
        "worst_crop": 0.2,
        "upscaled": 0,
    }
    buckets = {"buckets": [bucket], "dropped": [], "advice": [HOSTILE]}
    data = {
        "samples": 4,
        "rejected": {"bad.mp4": HOSTILE},
        "rejected_count": 700,
        "buckets": buckets,
    }
    (run_dir / "data.json").write_text(json.dumps(data))
    audit = {"totals": {"samples": 5, "ok": 4, "warn": 0, "reject": 1, "codes": {"too_short": 1}}}
    (run_dir / "audit.json").write_text(json.dumps(audit))
    page = report(run_dir)
    result = page.section("Result")
    assert "The adapter failed its checks" in result
    assert "scale failed alpha lacks" in result
    assert "29.to_q 0.2900" in result
    assert "All modules 30" in result
    assert "from epoch 2 on data NaN" in page.text
    folded = {str(tag["id"]): "open" in tag for tag in page.all("details") if tag.get("class") == "fold"}
    assert [id for id, is_open in folded.items() if is_open] == ["fold-result"], "only a failed result is unfolded"
    assert set(folded) >= {"fold-modules", "fold-data", "fold-recipe"}
    section_text = page.section("Data")
    for expected_text in (
        "samples 4",
        "Audit: reject 1",
        "too_short 1",
        "9 48 x 32 3 4 100.0% 10% 20% 0",
        "Rejected 700 samples",
        "699 more",
    ):
        assert expected_text in section_text
    assert page.source.count("<script>") == 3


@pytest.mark.parametrize(
    "name",
    [
        "verification.json",
        "data.json",
        "audit.json",
        "facts.json",
        "status.json",
        "environment.json",
    ],
)
@pytest.mark.parametrize("text", ["[1]", "{", "\udcff", '{"checks": 3, "modules": [4], "buckets": {"buckets": [7]}}'])
def test_records_that_are_torn_or_of_another_shape_cost_no_more_than_themselves(
    run_dir: Path, name: str, text: str
) -> None:
    (run_dir / name).write_bytes(text.encode(errors="surrogateescape"))
    page = report(run_dir)
    assert "Training loss 1.100" in page.text
    assert ("is not a JSON object" in page.text) == (not text.startswith('{"'))


def test_statistics_of_modules_become_heat_maps(run_dir: Path) -> None:
    lines = [metrics_line(step) for step in range(1, 21)]
    for line in lines[4::5]:
        line["modules"] = {f"blocks.{HOSTILE}.{i}": {"grad_norm": 0.1 * i} for i in range(3)}
    write_lines(run_dir / "metrics.jsonl", lines)
    page = report(run_dir)
    heat = [data for data in page.data if "rows" in data]
    assert [heat_map["steps"] for heat_map in heat] == [[5, 10, 15, 20]] * 2
    assert [len(heat_map["rows"]) for heat_map in heat] == [3, 1]  # by block, by layer
    assert [row[-1] for row in heat[0]["values"]] == [0.0, 0.1, 0.2]
    assert page.source.count("<script>") == 3


def test_the_recipe_is_compared_with_the_shipped_one(run_dir: Path) -> None:
    recipe = load_recipe(
        find_packaged_files_root() / "recipes" / "cogvideox" / "2b_t2v.yaml",
        ["lora.rank=77", "data.path=mine"],
    )
    (run_dir / "config.yaml").write_text(dump_recipe(recipe))
    page = report(run_dir).section("Recipe")
    assert "Changes from the shipped recipe cogvideox/2b_t2v" in page
    shipped = load_recipe(find_packaged_files_root() / "recipes" / "cogvideox" / "2b_t2v.yaml").lora.rank
    assert f"Key Shipped This run lora.rank {shipped} 77 All values" in page


def test_the_recipes_own_file_is_compared_with_first_and_none_is_said() -> None:
    config = load_recipe(find_packaged_files_root() / "recipes" / "smoke" / "cogvideox.yaml").model_dump(mode="json")
    config["model"]["path"] = "elsewhere/mine"
    assert compare_with_shipped(config, None) is None
    for file in ("cogvideox.yaml", "smoke_cogvideox.yaml"):
        comparison = compare_with_shipped(config, file)
        assert comparison is not None
        assert comparison.name == "smoke/cogvideox"
        assert comparison.changed == []


def test_a_long_run_is_bounded_in_size_and_time(run_dir: Path) -> None:
    """Once read, a run of 10,000 steps is rewritten in a fraction of a second, and is as large as one of 2,000."""
    reader, sizes = RunReader(run_dir), []
    path = run_dir / "metrics.jsonl"
    for count in (2_000, 10_000):
        write_lines(path, [metrics_line(step, loss=1 + step % 7) for step in range(1, count + 1)])
        write_run_page(reader)
        start = time.process_time()
        sizes.append(write_run_page(reader).stat().st_size)
        assert time.process_time() - start < 2
    assert sizes[1] < 1.5 * sizes[0] < 3 * 2**20


def test_the_time_of_a_run_is_shown_phase_by_phase(run_dir: Path) -> None:
    folder = run_dir
    assert "phases.json is missing" in report(folder).text
    phases = [
        ("imports", "before", 3.25, 1),
        ("preflight/kernels", "before", 1.5, 1),
        ("preflight", "before", 2.0, 1),
        ("saving", "training", 0.5, 4),
        ("verification", "after", 0.75, 1),
    ]
    record = {
        "stages": {"before": 6.25, "training": 90.0, "after": 1.0},
        "phases": [
            {"name": name, "stage": stage, "seconds": s, "cpu_seconds": s / 2, "count": count}
            for name, stage, s, count in phases
        ],
    }
    (folder / "phases.json").write_text(json.dumps(record))
    text = report(folder).text
    assert "Before the first step: 6.2 s" in text
    assert text.index("3.25 s") < text.index("2.00 s") < text.rindex("preflight: kernels")
    assert "other 1.00 s" in " ".join(text.split())
    assert "CPU 0.25 s, 4 times" in text
    assert "After the last step: 1.0 s" in text
    assert "not made in full" not in text
    record["reductions"] = {"eval loss": "4 clips"}
    (folder / "phases.json").write_text(json.dumps(record))
    text = report(folder).text
    assert "Checks that were not made in full:" in text
    assert "eval loss: 4 clips" in text
    (folder / "phases.json").write_text('{"phases": [7, {"name": null}], "stages": [1]}')
    assert "Not recorded" in report(folder).text
