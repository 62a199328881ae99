"""The GPU check, with an interpreter that only notes what it is asked for, as it was when it replaced PYTHONPATH."""

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from launching import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
INTERPRETER = """#!/usr/bin/env bash
case "$*" in *find_spec*) ;; *) printf '%s\\n' "$PYTHONPATH|${BUDGET:-}|$*" >>"$CALLS" ;; esac
case "$*" in
  *"import torch; raise"*) exit "${NO_GPU:-0}" ;;
  *find_spec*)
    found=(); for name in "${@:3}"; do case " $MISSING " in *" $name "*) found+=("$name") ;; esac; done
    echo "${found[*]}" ;;
  *kernels/bench/bench.py*) sleep "${SLEEP:-0}"; echo "a figure"; exit "${CODE:-0}" ;;
esac
"""
FIRST = ("machine", "steps_video", "kernel_tests", "kernel_times")
SECOND = ("steps_images", "gpu_tests", "recovery", "steps_more")


class Check:
    """One call in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.out = folder, folder / "calls", folder / "out"
        self.python = folder / "python"
        self.python.write_text(INTERPRETER)
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in os.environ.items() if name not in ("OUT", "CODE")}
        variables |= {
            "PYTHON": str(self.python),
            "CALLS": str(self.calls),
            "MISSING": "",
            **environment,
        }
        self.calls.unlink(missing_ok=True)
        return subprocess.run(
            ["bash", str(SCRIPT), *arguments, "--out", str(self.out)],
            env=variables, cwd=self.folder, capture_output=True, text=True, timeout=600,
        )  # fmt: skip

    @property
    def asked(self) -> list[tuple[str, str, str]]:
        """PYTHONPATH, seconds and arguments of each call of the interpreter."""
        return [tuple(line.split("|", 2)) for line in self.calls.read_text().splitlines()]  # type: ignore[misc]

    @property
    def summary(self) -> dict[str, str]:
        lines = (self.out / "summary.txt").read_text().splitlines()
        return dict(line.removeprefix("== ").split(": ", 1) for line in lines)


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


def test_packages_that_the_caller_gives_are_found_by_every_part(check: Check) -> None:
    """A machine without the project's packages gets them in PYTHONPATH; if replaced, half of the check is skipped."""
    process = check.run("first", PYTHONPATH="/given:/too")
    assert process.returncode == 0, process.stdout + process.stderr
    ours = f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests'}"
    assert {path for path, _, _ in check.asked} == {f"{ours}:/given:/too"}
    check.run("first", PYTHONPATH="")
    assert {path for path, _, _ in check.asked} == {ours}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("goal", "parts"), [("gpu-check", FIRST), ("gpu-check-more", SECOND)])
def test_make_calls_it_with_what_it_is_given(check: Check, goal: str, parts: tuple[str, ...]) -> None:
    environment = {**os.environ, "PYTHONPATH": "/given", "CALLS": str(check.calls), "MISSING": ""}
    process = subprocess.run(
        ["make", "--silent", goal, f"PYTHON={check.python}", f"OUT={check.out}"],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert all(path.endswith(f"{ROOT / 'tests'}:/given") for path, _, _ in check.asked)
    assert tuple(check.summary) == parts


def test_each_call_has_its_parts_in_order_and_keeps_their_output(check: Check) -> None:
    process = check.run("first")
    assert process.returncode == 0, process.stdout + process.stderr
    assert tuple(check.summary) == FIRST
    assert all(state.startswith("done in ") for state in check.summary.values())
    assert (check.out / "kernel_times.log").read_text() == "a figure\n"
    assert check.run("second").returncode == 0
    assert tuple(check.summary) == (*FIRST, *SECOND), "the second call's parts are added"
    steps = [arguments for _, _, arguments in check.asked if "benchmarks.step " in arguments]
    folders = [step.split(" --out ")[1].split()[0] for step in steps]
    assert folders == [str(check.out / name) for name in ("steps_images", "steps_more")]
    assert [step.split(" --models ")[1] for step in steps] == [
        "sana-1.6b-b8 dit-xl2-b32 sana-1.6b-b4 dit-xl2-b64",
        "cogvideox-2b wan-1.3b cogvideox-1.5",
    ]


def test_parts_can_be_asked_for_alone(check: Check) -> None:
    assert check.run("recovery", "machine").returncode == 0
    assert tuple(check.summary) == ("recovery", "machine")


def test_no_part_is_given_more_than_is_left_of_ten_minutes(check: Check) -> None:
    assert "GPU_CHECK_SECONDS:-585" in SCRIPT.read_text()
    assert check.run("first", GPU_CHECK_SECONDS="50").returncode == 1
    assert "left out: " in check.summary["kernel_tests"]
    assert "done" in check.summary["steps_video"]
    assert max(int(seconds) for _, seconds, _ in check.asked if seconds) <= 50


def test_what_is_left_out_stopped_or_failed_says_so(check: Check) -> None:
    process = check.run("first", MISSING="diffusers av", CODE="3")
    assert process.returncode == 1
    assert "has no diffusers av; docs/gpu.md lists" in check.summary["steps_video"]
    assert check.summary["kernel_times"].startswith("failed with 3 ")
    assert check.summary["kernel_tests"].startswith("done in ")
    assert check.run("first", CODE="124").returncode == 1  # as `timeout` ends
    assert check.summary["kernel_times"].startswith("stopped after ")


def test_without_a_gpu_only_tiny_sizes_run(check: Check) -> None:
    process = check.run("first", NO_GPU="1")
    assert process.returncode == 1
    assert "--tiny goes through it on a CPU" in process.stderr
    assert check.run("first", "--tiny", NO_GPU="1").returncode == 0
    commands = [arguments for _, _, arguments in check.asked if not arguments.startswith("-c")]
    assert [step for step in commands if "--device cuda" in step] == []
    assert any("--models tiny" in step for step in commands)


def test_kernel_tests_use_every_core_where_they_can(check: Check) -> None:
    check.run("first")
    (spread,) = [a for _, _, a in check.asked if "tests/dit_lora_kernels" in a]
    assert " -n " in spread
    assert "not sm90 and not mutants" in spread
    check.run("first", MISSING="xdist")
    (arguments,) = [a for _, _, a in check.asked if "tests/dit_lora_kernels" in a]
    assert " -n " not in arguments


@pytest.mark.parametrize("arguments", [(), ("third",), ("first", "--fast")])
def test_a_call_that_it_does_not_know_is_refused(check: Check, arguments: tuple[str, ...]) -> None:
    process = check.run(*arguments)
    assert process.returncode == 2
    assert process.stderr.startswith("usage: ")


def test_the_commit_is_known_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import machine

    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.delenv("DIT_LORA_COMMIT", raising=False)
    assert machine.commit() == "unknown"
    (tmp_path / "COMMIT").write_text("abc1234\n")
    assert machine.commit() == "abc1234"
    monkeypatch.setenv("DIT_LORA_COMMIT", "def5678")
    assert machine.commit() == "def5678"
    monkeypatch.delenv("DIT_LORA_COMMIT")
    monkeypatch.setattr(machine, "ROOT", ROOT)
    if (ROOT / ".git").exists():
        assert machine.commit() not in ("unknown", "abc1234", "def5678")


def test_a_gpus_clocks_and_power_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.gpu_state import gpu_state

    values = "580.1, 1980 MHz, 1980 MHz, 3201 MHz, 402.11 W, 700.00 W, 41"
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/usr/bin/env bash\necho '{values}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_state() == dict(
        zip(
            ("driver", "clock", "highest clock", "memory clock", "power", "power limit", "temperature"),
            values.split(", "),
            strict=True,
        )
    )  # fmt: skip
    assert json.loads(json.dumps(gpu_state())) == gpu_state()
    fake.write_text("#!/usr/bin/env bash\nexit 9\n")
    assert gpu_state() == {}
