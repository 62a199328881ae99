"""The top of a run's report: its sentence, the guard's badge and what to do next, all from the run's folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_runs import HOSTILE, report, write_lines

from dit_lora.report.run.files import RunReader
from dit_lora.report.run.summary import RunSummary, build_summary, choose_run_path, describe_failed_steps


def event(step: int, action: str, *samples: str, **diagnosis: Any) -> dict[str, Any]:
    return {"step": step, "action": action, "sample_ids": list(samples), "verdict": diagnosis}


def summarize(folder: Path, steps: tuple[int, ...] = ()) -> RunSummary:
    run = RunReader(folder).read()
    return build_summary(run, choose_run_path(run), steps)


def set_state(folder: Path, state: str) -> None:
    (folder / "status.json").write_text(json.dumps({"state": state}), encoding="utf-8")


def change_recipe(folder: Path, **sections: Any) -> None:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | sections), encoding="utf-8")


@pytest.mark.parametrize(
    ("events", "texts"),
    [
        ([], []),
        ([event(3, "report")], []),
        ([event(3, "skip", "a.mp4")], ["1 step was repeated without a.mp4"]),
        # The same step twice, and five samples.
        (
            [event(3, "skip", "a", "b"), event(3, "quarantine", "c"), event(9, "skip", "d", "e")],
            ["2 steps were repeated without a, b, c and 2 more"],
        ),
        # No sample is the cause of the second: the step is left out.
        ([event(3, "skip", "a"), event(5, "skip")], ["1 step was repeated without a", "1 step was left out"]),
        # Another rank's diagnosis of the same step.
        ([event(3, "skip", "a"), event(3, "skip")], ["1 step was repeated without a"]),
        ([event(3, "fallback", switch="flash")], ["1 step was repeated with flash switched off"]),
        ([event(3, "retry"), event(4, "rollback")], ["1 step was repeated unchanged", "rolled back once"]),
    ],
)
def test_failed_steps_are_counted_with_what_they_were_repeated_without(events: list[Any], texts: list[str]) -> None:
    assert list(describe_failed_steps(events).texts) == texts


def test_the_sentence_says_how_the_run_ended(run_dir: Path) -> None:
    assert summarize(run_dir).sentence == "Interrupted: 20 of 40 steps; eval loss fell from 2.500 to 2.000."
    set_state(run_dir, "finished")
    (run_dir / "verification.json").write_text('{"passed": true}')
    write_lines(run_dir / "eval_loss.jsonl", [{"step": 0, "eval_loss": 2.0}, {"step": 20, "eval_loss": 2.001}])
    write_lines(run_dir / "events.jsonl", [event(7, "quarantine", "horse.mp4")])
    assert summarize(run_dir).sentence == (
        "Finished: 20 of 40 steps; eval loss stayed from 2.000 to 2.001; 1 step was repeated without horse.mp4; "
        "the adapter passed its checks."
    )


def test_the_badge_names_the_sample_that_cost_a_step(run_dir: Path) -> None:
    def get_badge() -> tuple[str, str]:
        summary = summarize(run_dir)
        return summary.badge, summary.badge_color

    assert get_badge() == ("guard: no step failed", "ok")
    write_lines(run_dir / "events.jsonl", [event(7, "report")])
    assert get_badge() == ("guard: no step lost, 1 event reported", "ok")
    write_lines(run_dir / "events.jsonl", [event(7, "skip", HOSTILE)])
    page = report(run_dir)
    [badge] = [link for link in page.all("a") if link.get("id") == "guard-badge"]
    assert badge["class"] == "pill warn"
    assert f"guard: 1 step was repeated without {HOSTILE}" in page.text
    write_lines(run_dir / "events.jsonl", [event(7, "skip", "a"), event(8, "stop")])
    assert get_badge() == ("guard: 1 step was repeated without a", "warn"), "it was continued after the stop"
    set_state(run_dir, "stopped")
    assert get_badge() == ("guard: stopped at step 8", "reject")


def test_actions_fit_the_state_of_the_run(run_dir: Path) -> None:
    change_recipe(run_dir, run={"dir": "runs/kitten-run"})
    assert summarize(run_dir).actions == [], "no checkpoint to continue from, and no result"
    [action] = summarize(run_dir, (10, 20)).actions
    assert action.title == "Continue it after step 20"
    assert action.command == "dit-lora train runs/kitten-run/config.yaml train.resume=auto"
    set_state(run_dir, "stopped")
    last = event(8, "stop", words="the weights diverged") | {"bundle": "bundles/step_8"}
    write_lines(run_dir / "events.jsonl", [last])
    assert [action.title for action in summarize(run_dir, (20,)).actions] == [
        *("Read what stopped it", "Continue it after step 20"),
    ]
    (run_dir / "bundles" / "step_8").mkdir(parents=True)
    (run_dir / "bundles" / "step_8" / "bundle.json").write_text("{}")
    assert summarize(run_dir).actions[1].command == "dit-lora replay runs/kitten-run/bundles/step_8"
    assert "the weights diverged" in summarize(run_dir).actions[0].detail


def test_a_finished_run_is_looked_at_sampled_and_loaded(run_dir: Path) -> None:
    change_recipe(run_dir, validation={"prompts": ["a cat's nap"]}, run={"dir": "elsewhere/moved-since"})
    set_state(run_dir, "finished")
    (run_dir / "adapter").mkdir()
    (run_dir / "facts.json").write_text(json.dumps({"pipeline": {"loads_lora": True, "from_image": True}}))
    write_lines(run_dir / "events.jsonl", [event(7, "skip", "horse.mp4", words="latents hold NaN")])
    look, sample, load = summarize(run_dir, (20,)).actions
    assert (look.title, look.detail, look.link) == ("Look at horse.mp4", "latents hold NaN", "guard")
    assert sample.command == "dit-lora sample kitten-run --prompt 'a cat'\"'\"'s nap' --image IMAGE"
    assert load.command == 'pipe.load_lora_weights("kitten-run/adapter")'
    page = report(run_dir)
    assert "Look at horse.mp4 latents hold NaN Sample it dit-lora sample" in page.text


@pytest.mark.parametrize(("schedule", "offered"), [("constant", True), ("cosine", False)])
def test_more_steps_are_offered_where_the_schedule_does_not_end(run_dir: Path, schedule: str, offered: bool) -> None:
    change_recipe(
        run_dir, train={"steps": 20}, optim={"schedule": schedule, "groups": {"adapter": {"schedule": None}}}
    )
    set_state(run_dir, "finished")
    (run_dir / "adapter").mkdir()
    commands = [action.command for action in summarize(run_dir, (20,)).actions]
    assert any("train.steps=40 train.resume=auto" in command for command in commands) == offered


def test_a_result_that_failed_its_checks_comes_first(run_dir: Path) -> None:
    (run_dir / "verification.json").write_text('{"passed": false}')
    write_lines(run_dir / "events.jsonl", [event(7, "skip", "horse.mp4")])
    assert [action.link for action in summarize(run_dir).actions] == ["result", "guard"]
