"""The doctor's report is plain data that says what is wrong, and its tables fit a terminal."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dit_lora.commands.doctor import build_report, find_launch_config_problem, print_report
from dit_lora.environment.versions import TESTED, Device, Environment, find_version_problems
from dit_lora.errors import DitLoraError

TESTED_VERSIONS = {
    name: tested.tested_version for name, tested in TESTED.items() if tested.required and tested.tested_version
}
ON_CPU = Environment("3.12.4", "Linux-6.1.0-x86_64", {**TESTED_VERSIONS, "numpy": "2.4.6"})
H100 = Device("NVIDIA H100 80GB HBM3", 79.1, bf16=True)
ON_GPU = replace(ON_CPU, torch_cuda="13.0", devices=(H100,))


def config(kind: str, processes: int, **more: Any) -> dict[str, Any]:
    return {"distributed_type": kind, "num_processes": processes, **more}


@pytest.fixture(autouse=True)
def _no_default_launch_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def test_a_tested_environment_is_ok():
    """Nothing to refuse and no launch file: ok, and every package has a status."""
    report_values = build_report(ON_CPU, None)
    assert report_values["ok"] is True
    assert report_values["python"] == "3.12.4"
    assert report_values["platform"] == "Linux-6.1.0-x86_64"
    assert report_values["known_bad"] == []
    assert report_values["launch"] == {"config_file": None, "processes": None, "problem": None}
    assert {name: entry["status"] for name, entry in report_values["packages"].items()} == {
        name: "tested" if tested.required else "absent" for name, tested in TESTED.items()
    }
    assert report_values["packages"]["torch"]["version"] == "2.13.0"
    assert report_values["packages"]["flash-attn"]["tested"] is None
    assert [entry["what"] for entry in report_values["decisions"]][:2] == ["device", "dtype"]


@pytest.mark.parametrize(
    ("platform", "torch", "choice", "why"),
    [
        ("Linux-6.1.0-x86_64", "2.13.0+cu130", "Linux", "tested on CPUs and NVIDIA GPUs"),
        ("Linux-6.1.0-x86_64", "2.13.0+rocm6.4", "Linux, ROCm", "not tested: try a smoke recipe first"),
        ("macOS-15.1-arm64-arm-64bit", "2.13.0", "macOS", "not tested; dit-lora train uses the CPU"),
        ("Windows-11-10.0.26100-SP0", "2.13.0+cpu", "Windows", "use WSL 2"),
    ],
)
def test_the_report_says_what_is_known_of_the_platform(platform: str, torch: str, choice: str, why: str) -> None:
    env = replace(ON_CPU, platform=platform, versions={**ON_CPU.versions, "torch": torch})
    (entry,) = [entry for entry in build_report(env, None)["decisions"] if entry["what"] == "platform"]
    assert entry["choice"] == choice
    assert why in entry["why"]


def test_a_report_survives_json():
    """It is made of plain values alone, so that `--json` can print it."""
    env = replace(ON_GPU, versions={**ON_GPU.versions, "peft": "0.11.1", "diffusers": "0.43.0"})
    report_values = build_report(env, None)
    assert json.loads(json.dumps(report_values)) == report_values
    assert report_values["device"] == {
        "cuda_available": True,
        "torch_cuda": "13.0",
        "gpus": [{"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.1, "bf16": True}],
    }


@pytest.mark.parametrize(
    ("env", "ok"),
    [
        (ON_GPU, True),  # the cuDNN fault is handled by the run
        (replace(ON_CPU, versions={**ON_CPU.versions, "diffusers": "0.43.0"}), True),
        (replace(ON_CPU, versions={**ON_CPU.versions, "diffusers": "1.0.0"}), False),
        (replace(ON_CPU, versions={**ON_CPU.versions, "torchvision": "0.27.0"}), False),
        (replace(ON_CPU, versions={}), False),
    ],
)
def test_only_refusals_make_a_report_not_ok(env, ok):
    """Warnings and handled faults leave it ok; a refused version or combination does not."""
    assert build_report(env, None)["ok"] is ok


def test_a_known_bad_is_reported_with_its_source_and_remedy():
    """The handled fault is in the report, so that its user can read about it."""
    (entry,) = build_report(ON_GPU, None)["known_bad"]
    assert entry["id"] == "cudnn-sdpa-backward"
    assert entry["severity"] == "handled"
    assert entry["source"] == "https://github.com/pytorch/pytorch/issues/196678"
    assert "kept off cuDNN" in entry["remedy"]


def test_a_launch_file_that_would_lose_processes_is_not_ok(tmp_path: Path):
    """MULTI_CPU with two processes starts one."""
    path = tmp_path / "cpu.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n", encoding="utf-8")
    report_values = build_report(ON_CPU, path)
    assert report_values["ok"] is False
    assert report_values["launch"]["config_file"] == str(path)
    assert report_values["launch"]["processes"] == 2
    assert "torchrun --nproc_per_node 2" in report_values["launch"]["problem"]


def test_the_default_launch_file_is_judged_when_none_is_named(tmp_path: Path):
    """It is the one that `accelerate launch` would read."""
    path = tmp_path / "home" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("distributed_type: 'NO'\nnum_processes: 3\n", encoding="utf-8")
    assert build_report(ON_CPU, None)["launch"]["config_file"] == str(path)
    assert build_report(ON_CPU, None)["ok"] is False


def test_a_launch_file_that_is_not_there_is_bad_input(tmp_path: Path):
    """A file asked for by name is not passed over in silence."""
    with pytest.raises(DitLoraError, match=r"absent\.yaml"):
        build_report(ON_CPU, tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("values", "env", "part"),
    [
        (config("NO", 1), ON_CPU, None),
        (config("NO", 1), ON_GPU, None),
        ({"distributed_type": False, "num_processes": 1}, ON_CPU, None),  # NO without quotes
        (config("MULTI_GPU", 2, use_cpu=True), ON_CPU, None),  # torchrun starts both
        (config("MULTI_CPU", 2), ON_CPU, "the run has 1"),
        (config("MULTI_CPU", 2, mpirun_config={"mpirun_ccl": "1"}), ON_CPU, None),
        (config("NO", 2), ON_GPU, "the run has 1"),
        (config("NOPE", 1), ON_GPU, "distributed_type NOPE is not supported; give one of NO, "),
        (config("XLA", 1, compute_environment="AMAZON_SAGEMAKER"), ON_GPU, None),
        (config("FSDP", 2), ON_CPU, None),
        (config("FSDP", 1), ON_CPU, "FSDP needs several processes, and this run has one"),
        (config("FSDP", 1), ON_GPU, "FSDP needs several processes, and this run has one"),
        (config("DEEPSPEED", 1), ON_GPU, None),
        (config("MULTI_GPU", 2), ON_GPU, "set num_processes to 1"),
        (config("MULTI_GPU", 2), replace(ON_GPU, devices=(H100, H100)), None),
        (config("MULTI_GPU", 2, num_machines=2), ON_GPU, None),
        (config("MULTI_GPU", 4, num_machines=2), ON_GPU, "set num_processes to 1"),
        ({"distributed_type": "MULTI_GPU"}, ON_GPU, None),
    ],
)
def test_a_launch_file_is_judged_on_the_machine_it_is_for(values, env, part):
    """Processes lost, FSDP on one process, and more processes than GPUs are told beforehand."""
    problem = find_launch_config_problem(values, env)
    assert problem is None if part is None else part in (problem or "")


def test_tables_fit_80_columns_and_commands_stay_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A command can be copied as one line, and brackets are shown as they are."""
    monkeypatch.setenv("COLUMNS", "80")
    versions = {**ON_GPU.versions, "peft": "0.11.1", "diffusers": "0.43.0", "flash-attn": "2.8.3"}
    gpu = replace(H100, name="GPU [red]80GB[/red]")
    env = replace(ON_GPU, versions=versions, torch_cuda="12.4", devices=(gpu,))
    path = tmp_path / "[bold].yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n", encoding="utf-8")
    print_report(build_report(env, path))
    output = capsys.readouterr().out
    for problem in find_version_problems(env):
        assert problem.remedy in output
        assert problem.what in output
    for name in TESTED:
        assert f" {name} " in output
    assert "[red]80GB[/red]" in output
    assert "[bold].yaml" in output
    assert "set num_processes to 1" in output
    assert output.rstrip().endswith("not ready to train: correct the lines marked refuse")
    unbroken_texts = [text for p in find_version_problems(env) for text in (p.what, p.remedy)] + ["num_processes"]
    unbroken_texts += [str(path)]
    wrapped = [line for line in output.splitlines() if not any(text in line for text in unbroken_texts)]
    assert len(wrapped) > len(TESTED)
    assert max(map(len, wrapped)) <= 80


def test_a_good_report_ends_in_ready(capsys: pytest.CaptureFixture[str]):
    """The last line is the answer."""
    print_report(build_report(ON_CPU, None))
    output = capsys.readouterr().out
    assert output.rstrip().endswith("ready to train")
    assert "refuse" not in output
