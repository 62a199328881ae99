"""Phases of a run: each timed part counts once, in the right phase, and is printed and written."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT

from dit_lora.training.session.phases import PHASES_FILE, PhaseTimer


def busy(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


def test_phases_add_up_nest_and_tell_waiting_from_work() -> None:
    phases = PhaseTimer()
    for _ in range(2):
        with phases.time_phase("checks"), phases.time_phase("kernels"):
            busy(0.06)
    with phases.time_phase("waiting"):
        time.sleep(0.1)
    checks, waiting = (next(p for p in phases.entries if p.name == n) for n in ("checks", "waiting"))
    kernels = next(p for p in phases.entries if p.name == "checks/kernels")
    assert (checks.count, kernels.count) == (2, 2)
    assert checks.seconds >= kernels.seconds
    assert kernels.seconds > kernels.cpu_seconds - 0.01  # two clocks, of different grain
    assert kernels.cpu_seconds >= 0.12
    assert waiting.seconds >= 0.1
    assert waiting.cpu_seconds < 0.05
    assert phases.describe_slow_start() is None
    phases._stage_start -= 70.0
    phases.add_time("loading", 60.0, 3.0)
    line = phases.describe_slow_start()
    assert line is not None
    assert "kernels" not in line, "it is a part of the checks"
    assert ": loading 60, " in line, "the longest comes first"


def test_the_closing_lines_parts_are_the_whole_time() -> None:
    """A step counts once; phases before the first step are no part of `start`; what does not fit is `other`."""
    phases = PhaseTimer()
    phases._stage_start -= 100.0
    phases.add_time("imports", 50.0, 1.0)
    phases.add_time("preflight", 10.0, 1.0)
    phases.add_time("preflight/kernels", 9.0, 1.0)
    # Inside of the first step, which is counted without it.
    phases.add_time("gradient check", 5.0, 1.0)
    phases.add_step_time(15.0)
    phases.end_first_step()
    phases._stage_start -= 60.0
    phases.add_step_time(40.0)
    phases.add_time("samples", 12.0, 1.0)
    phases.end_training_stage()
    phases._stage_start -= 20.0
    phases.add_time("samples", 8.0, 1.0)
    phases.add_time("kernel parity", 1.0, 1.0)
    phases.add_time("saving", 2.0, 1.0)
    phases.add_time("eval loss", 0.3, 1.0)
    # 100 before the first step ends, without 15 of checks and 15 in the step.
    assert phases.describe_time() == "time: 180 s: steps 55, start 70, samples 20, checks 16, saving 2, other 17"
    exact = phases.summarize_time()
    assert exact["other"] == pytest.approx(16.7, abs=0.1)
    assert sum(exact.values()) == pytest.approx(180, abs=0.1)
    phases.add_time("report", 9000.0, 1.0)
    phases._stage_start -= 100_000.0
    line = phases.describe_time()
    assert len(line) <= 80
    *parts, other = map(int, re.findall(r" (\d+)", line)[1:])
    assert sum(parts) + other == pytest.approx(100_180, abs=4)


def test_a_run_writes_its_phases_by_stage(tmp_path: Path) -> None:
    phases = PhaseTimer()
    time.sleep(0.12)
    with phases.time_phase("named"):
        time.sleep(0.06)
    phases.begin_first_step()
    assert phases.end_first_step()
    assert not phases.end_first_step(), "there is one first step"
    with phases.time_phase("saving"):
        pass
    phases.end_training_stage()
    phases.write_phase_times(tmp_path)
    record = json.loads((tmp_path / PHASES_FILE).read_text())
    stages = {phase["name"]: phase["stage"] for phase in record["phases"]}
    assert stages == {"named": "before", "first step": "before", "saving": "training"}
    assert record["stages"]["before"] >= 0.18
    assert set(record["stages"]) == {"before", "training", "after"}


def test_steps_that_are_taken_again_count_as_training() -> None:
    phases = PhaseTimer()
    phases.begin_first_step()
    phases.end_first_step()
    phases.end_training_stage()
    phases.add_time("kernel parity", 2.0, 2.0)
    # The comparison has rolled the run back: its steps are taken again.
    phases.resume_training_stage()
    phases.add_time("saving", 7.0, 7.0)
    phases.end_training_stage()
    phases.add_time("samples", 3.0, 3.0)
    stages = {phase.name: phase.stage for phase in phases.entries if phase.name != "first step"}
    assert stages == {"kernel parity": "after", "saving": "training", "samples": "after"}


def test_a_gpu_is_waited_for_before_the_first_step_and_never_in_training() -> None:
    waits: list[str] = []
    phases = PhaseTimer(synchronize=lambda: waits.append("waited"))
    with phases.time_phase("loading"):
        pass
    assert len(waits) == 1
    phases.begin_first_step()
    phases.end_first_step()
    with phases.time_phase("saving"):
        pass
    assert len(waits) == 1


def test_an_error_ends_its_phase() -> None:
    phases = PhaseTimer()
    with pytest.raises(ValueError, match="torn"), phases.time_phase("encoding"):
        raise ValueError("torn")
    with phases.time_phase("loading"):
        pass
    assert [phase.name for phase in phases.entries] == ["encoding", "loading"]


def test_imports_are_what_a_process_did_before() -> None:
    code = (
        "import time\n"
        "began = time.process_time()\n"
        "while time.process_time() - began < 0.3: pass\n"
        "time.sleep(0.4)\n"
        "from dit_lora.training.session.phases import PhaseTimer\n"
        "import os; (one,) = PhaseTimer.from_process().entries\n"
        "launcher, imports = PhaseTimer.from_process(os.getppid()).entries\n"
        "print(one.name, one.seconds, one.cpu_seconds, launcher.name, launcher.seconds)\n"
    )
    began = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
    )
    elapsed_s = time.perf_counter() - began
    assert result.returncode == 0, result.stderr
    name, seconds, cpu, launcher, before = result.stdout.split()
    assert (name, launcher) == ("imports", "launcher")
    assert 0.65 < float(seconds) < elapsed_s + 0.05
    assert 0.3 <= float(cpu) < float(seconds) - 0.3
    # This process launched it, and is older.
    assert float(before) > 0
