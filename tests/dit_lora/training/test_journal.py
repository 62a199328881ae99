"""What a run writes as it goes."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from dit_lora.errors import DitLoraError
from dit_lora.guard.diagnosis import Event
from dit_lora.training.eval_losses import read_eval_losses
from dit_lora.training.journal import (
    MAX_IDLE_STEPS,
    Journal,
    build_metrics_line,
    flatten_for_trackers,
)
from dit_lora.training.step import StepResult
from dit_lora.training.tasks.diffusion.task import average_by_timestep, count_by_timestep


def spike(step: int) -> Event:
    return Event(step, "spike", {"cause": "unknown", "words": "far beyond the others"})


def result(step: int, **values: Any) -> StepResult:
    defaults = {
        "loss": 0.5,
        "grad_norm": 2.0,
        "grad_norm_groups": {"adapter": 2.0},
        "lr_groups": {"adapter": 1e-4, "connector": 1e-5},
        "losses": [0.25, 0.75],
        "timesteps": [10, 999],
        "seconds": 1.0,
        "data_seconds": 0.1,
        "stop_code": 0,
        **values,
    }
    return StepResult(step=step, **defaults)


def line_of(step: int, **values: Any) -> dict[str, Any]:
    step_result = result(step, **values)
    return build_metrics_line(step_result, {"loss_by_timestep": average_by_timestep(step_result, range(1000))})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_ranges_are_those_of_the_timesteps_that_are_drawn() -> None:
    """An expert for high noise sees timesteps from 875 on: quarters and twentieths of these, the last one shorter."""
    step_result = result(1, losses=[1.0, 3.0, 5.0, 8.0], timesteps=[875, 881, 907, 999])
    high = range(875, 1000)
    assert average_by_timestep(step_result, high) == {
        "875-906": 2.0,
        "907-938": 5.0,
        "971-999": 8.0,
    }
    assert count_by_timestep(step_result, high) == {"875-881": 2, "903-909": 1, "994-999": 1}
    assert count_by_timestep(step_result, range(1000)) == {"850-899": 2, "900-949": 1, "950-999": 1}


def test_losses_are_averaged_in_timestep_ranges(tmp_path: Path) -> None:
    journal = Journal(tmp_path, start_step=0)
    losses, timesteps = [1.0, 3.0, 5.0, 7.0, 9.0], [0, 249, 250, 749, 999]
    line = line_of(1, losses=losses, timesteps=timesteps)
    journal.write_step(line)
    assert line["loss_by_timestep"] == {
        "0-249": 2.0,
        "250-499": 5.0,
        "500-749": 7.0,
        "750-999": 9.0,
    }
    assert line["lr"] == 1e-4
    assert line["samples"] == 5
    assert lines(tmp_path / "metrics.jsonl") == [line]


def test_a_resumed_run_writes_each_step_once_and_counts_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path, start_step=0)
    journal.write_eval_losses(0, {"eval_loss": 1.5})
    for step in (1, 2, 3):
        journal.write_step(line_of(step))
    journal.write_eval_losses(2, {"eval_loss": 1.25})
    journal.write_eval_losses(3, {"eval_loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # torn by a kill
    resumed = Journal(tmp_path, start_step=2)
    resumed.write_step(line_of(3))
    resumed.write_eval_losses(2, {"eval_loss": 99.0})  # there already
    resumed.write_eval_losses(3, {"eval_loss": 0.75})
    written = lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["samples"]) for line in written] == [(1, 2), (2, 4), (3, 6)]
    assert read_eval_losses(tmp_path) == {0: 1.5, 2: 1.25, 3: 0.75}


def test_starting_afresh_drops_what_an_unsaved_start_left(tmp_path: Path) -> None:
    Journal(tmp_path, start_step=0).write_eval_losses(0, {"eval_loss": 1.5})
    reopened = Journal(tmp_path, start_step=0)
    reopened.write_eval_losses(0, {"eval_loss": 1.5})
    assert len(lines(tmp_path / "eval_loss.jsonl")) == 1


def test_a_run_that_an_earlier_version_began_goes_on_with_its_eval_losses(tmp_path: Path) -> None:
    old_lines = [{"step": step, "held_out_loss": loss} for step, loss in ((0, 3.0), (2, 2.0), (4, 1.0))]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old_lines))
    journal = Journal(tmp_path, start_step=2)
    journal.write_eval_losses(2, {"eval_loss": 9.0})
    journal.write_eval_losses(4, {"eval_loss": 1.5})
    assert read_eval_losses(tmp_path) == {0: 3.0, 2: 2.0, 4: 1.5}
    assert lines(tmp_path / "eval_loss.jsonl") == [{"step": 4, "eval_loss": 1.5}]
    Journal(tmp_path, start_step=0)
    assert read_eval_losses(tmp_path) == {}


def test_lines_that_are_not_the_runs_own_stay_and_are_not_read(tmp_path: Path) -> None:
    losses = {0: 1.5, 2: 1.25, 4: 1.0}
    written_lines = [json.dumps({"step": step, "eval_loss": loss}) for step, loss in losses.items()]
    lines = "\n".join([written_lines[0], '{"note": "mine"}', *written_lines[1:], ""])
    (tmp_path / "eval_loss.jsonl").write_text(lines)
    (tmp_path / "metrics.jsonl").write_text('{"note": "mine too"}\n')
    journal = Journal(tmp_path, start_step=2)
    assert journal.get_base_loss("eval_loss") == 1.5
    assert read_eval_losses(tmp_path) == {0: 1.5, 2: 1.25}
    assert (tmp_path / "eval_loss.jsonl").read_text().splitlines()[1] == '{"note": "mine"}'
    assert (tmp_path / "metrics.jsonl").read_text() == '{"note": "mine too"}\n'


def test_trackers_get_flat_numbers() -> None:
    line = line_of(1)
    values = flatten_for_trackers(line)
    assert values["lr/connector"] == 1e-5
    assert values["grad_norm/adapter"] == 2.0
    assert values["loss_by_timestep/750-999"] == 0.75
    assert values["loss"] == 0.5
    assert "step" not in values
    assert all(isinstance(value, int | float) for value in values.values())
    assert values["peak_gib"] == pytest.approx(line["peak_gib"])


def test_going_back_drops_later_lines_and_counts_samples_from_there(tmp_path: Path) -> None:
    """What was held out and observed at the step itself stays; events are never dropped."""
    journal = Journal(tmp_path, start_step=0)
    for step in (1, 2, 3, 4):
        journal.write_step(line_of(step))
    for step, loss in ((0, 3.0), (2, 2.0), (4, 1.0)):
        journal.write_eval_losses(step, {"eval_loss": loss})
    journal.write_event(spike(4))
    journal.remove_lines_after(2)
    assert [line["step"] for line in journal.read_history()] == [1, 2]
    assert read_eval_losses(tmp_path) == {0: 3.0, 2: 2.0}
    assert lines(tmp_path / "events.jsonl") == [spike(4).to_record()]
    journal.write_step(line_of(3))
    journal.write_eval_losses(4, {"eval_loss": 0.5})
    assert [line["samples"] for line in journal.read_history()] == [2, 4, 6]
    assert read_eval_losses(tmp_path)[4] == 0.5
    journal.remove_lines_after(0)
    assert journal.read_history() == []
    assert read_eval_losses(tmp_path) == {0: 3.0}


def test_statistics_of_modules_are_in_the_lines_that_have_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path, start_step=0)
    journal.write_step(line_of(1))
    journal.write_step(line_of(2), {"proj_out": {"abs_max": 2.5}})
    first_line, second = lines(tmp_path / "metrics.jsonl")
    assert "modules" not in first_line
    assert second["modules"] == {"proj_out": {"abs_max": 2.5}}


def test_lines_that_a_full_disk_does_not_take_end_the_run_and_are_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[DitLoraError] = []
    journal = Journal(tmp_path, start_step=0, on_error=failed.append)
    journal.write_step(line_of(1))
    with monkeypatch.context() as patch:
        patch.setattr("dit_lora.training.journal.append_line", full)
        journal.write_step(line_of(2))
        journal.write_event(spike(2))
        with pytest.raises(OSError, match="No space left"):
            Journal(tmp_path / "other", start_step=0).write_event(spike(1))
    assert [str(error) for error in failed] == [
        f"cannot write {tmp_path / 'metrics.jsonl'}: No space left on device"
    ] * 2
    journal.flush_unwritten_lines()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert lines(tmp_path / "events.jsonl") == [spike(2).to_record()]


def full(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_torn_lines_are_passed_over_with_a_word_and_those_after_them_are_read(
    tmp_path: Path,
) -> None:
    first_journal = Journal(tmp_path, start_step=0)
    first_journal.write_step(line_of(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    first_journal.write_step(line_of(2))
    messages: list[str] = []
    reopened = Journal(tmp_path, start_step=2, say=messages.append)
    assert messages == ["warning: metrics.jsonl: skipped 1 incomplete line(s) of a killed process"]
    assert [line["step"] for line in reopened.read_history()] == [1, 2]


def test_a_group_without_a_gradient_for_some_steps_is_told_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path, start_step=0)
    line = line_of(1)
    dead = {**line, "grad_norm_groups": dict.fromkeys(line["grad_norm_groups"], 0.0)}
    steps = (
        [dead] * (MAX_IDLE_STEPS - 1) + [line] + [dead] * (2 * MAX_IDLE_STEPS) + [line] + [dead] * (2 * MAX_IDLE_STEPS)
    )
    idle_groups = [journal.find_idle_groups(step) for step in steps]
    assert idle_groups.pop(2 * MAX_IDLE_STEPS - 1) == list(line["grad_norm_groups"])
    assert not any(idle_groups)


def test_a_line_has_the_losses_that_were_measured_and_each_is_read_by_its_name(tmp_path: Path) -> None:
    journal = Journal(tmp_path, start_step=0)
    journal.write_eval_losses(0, {"eval_loss": 3.0})
    journal.write_eval_losses(2, {"eval_loss": 2.0, "validation_loss": 2.5})
    journal.write_eval_losses(4, {"validation_loss": 2.75})
    assert lines(tmp_path / "eval_loss.jsonl")[1] == {"step": 2, "eval_loss": 2.0, "validation_loss": 2.5}
    assert read_eval_losses(tmp_path) == {0: 3.0, 2: 2.0}
    assert read_eval_losses(tmp_path, "validation_loss") == {2: 2.5, 4: 2.75}
    assert journal.get_base_loss("eval_loss") == 3.0
    assert journal.get_base_loss("validation_loss") is None


def test_losses_that_rank_are_kept_in_memory_and_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "eval_loss.jsonl"
    file.write_text('{"step": 0, "eval_loss": 1.5}\n{"step": 2, "eval_loss": "low"}\n{"step": 3, "eval_loss": NaN}\n')
    journal = Journal(tmp_path, start_step=4)
    journal.write_eval_losses(4, {"eval_loss": 1.25})
    file.unlink()
    file.mkdir()
    assert journal.get_eval_losses("eval_loss") == {0: 1.5, 4: 1.25}
    assert journal.get_eval_losses("validation_loss") == {}
