"""Versions are judged by what was tested, and a launcher that leaves processes out is found out."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from dit_lora.compat import (
    KNOWN_BAD,
    LAUNCH_FLAGS,
    TESTED,
    Device,
    Environment,
    decisions,
    default_launch_config,
    launch_problem,
    package_status,
    probe_environment,
    problems,
    processes_asked,
    read_launch_config,
    require_compatible,
)
from dit_lora.errors import DitLoraError

ROOT = Path(__file__).parents[2]
H100 = Device("NVIDIA H100 80GB HBM3", 79.1, bf16=True)
T4 = Device("Tesla T4", 14.6, bf16=False)
ON_CPU = Environment(
    "3.11.9",
    "Linux-6.1.0-x86_64-with-glibc2.36",
    {
        "torch": "2.13.0+cpu",
        "diffusers": "0.42.1",
        "transformers": "5.23.0",
        "peft": "0.21.2",
        "accelerate": "1.15.0",
        "huggingface_hub": "2.4.0",
        "safetensors": "0.8.0",
        "av": "18.1.0",
        "numpy": "2.4.6",
    },
)


def having(env: Environment, **versions: str) -> Environment:
    """The environment with other versions; underscores stand for dashes in flash-attn."""
    named = {name.replace("flash_attn", "flash-attn"): value for name, value in versions.items()}
    return replace(env, versions={**env.versions, **named})


def without(env: Environment, *names: str) -> Environment:
    kept = {name: value for name, value in env.versions.items() if name not in names}
    return replace(env, versions=kept)


def ids(env: Environment) -> set[str]:
    return {problem.id for problem in problems(env)}


ON_GPU = replace(having(ON_CPU, torch="2.13.0"), torch_cuda="13.0", devices=(H100,))


def test_the_tested_set_has_no_problem_on_a_cpu():
    """Exactly the tested releases give nothing to say, optional packages absent."""
    assert problems(ON_CPU) == []
    assert require_compatible(ON_CPU, allow_untested=False) == []
    assert package_status("triton", ON_CPU) == "absent"
    assert package_status("torch", ON_CPU) == "tested"


def test_the_tested_set_on_a_gpu_only_has_what_the_run_handles():
    """What the run handles is listed and is not a warning."""
    assert [(problem.id, problem.severity) for problem in problems(ON_GPU)] == [
        ("cudnn-sdpa-backward", "handled")
    ]
    assert require_compatible(ON_GPU, allow_untested=False) == []


def test_floors_are_those_of_pyproject():
    """A floor changed in pyproject.toml alone, or here alone, is noticed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["flash-attn"], *extras["bitsandbytes"]]
    floors = {
        requirement.name: Version(specifier.version)
        for requirement in map(Requirement, lines)
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    checked = [name for name in TESTED if name != "triton"]  # torch decides on Triton
    assert {name: Version(TESTED[name].floor) for name in checked} == {
        name: floors[name] for name in checked
    }
    required = {Requirement(line).name for line in project["dependencies"]}
    assert {name for name in TESTED if TESTED[name].required} == required & set(TESTED)


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("torch", "2.10.9", "refused"),
        ("torch", "2.11.0+cu130", "in range"),
        ("torch", "2.13.0+cu126", "tested"),
        ("torch", "2.13.1", "in range"),
        ("torch", "2.14.0", "untested"),
        ("torch", "2.14.0.dev20260901", "untested"),
        ("torch", "3.0.0", "refused"),
        ("torch", "3.0.0.dev20260901", "refused"),
        ("torch", "not a version", "refused"),
        ("diffusers", "0.41.0", "refused"),
        ("diffusers", "0.42.0", "in range"),
        ("diffusers", "0.43.0", "untested"),
        ("diffusers", "1.0.0", "refused"),
        ("av", "14.0.0", "in range"),
        ("av", "18.2.0", "untested"),
        ("av", "19.0.0", "refused"),
        ("bitsandbytes", "0.44.1", "refused"),
        ("flash-attn", "2.8.3", "untested"),
        ("flash-attn", "3.0.0", "refused"),
    ],
)
def test_a_version_is_judged_by_floor_tested_release_and_next_major(name, version, status):
    """Below the floor and from the next major on is refused; a newer minor is untested."""
    env = replace(ON_CPU, versions={**ON_CPU.versions, name: version})
    assert package_status(name, env) == status
    severities = [problem.severity for problem in problems(env) if problem.id == name]
    assert severities == {"refused": ["refuse"], "untested": ["warn"]}.get(status, [])


def test_an_untested_minor_warns_with_the_tested_release():
    """The run goes on, and the line names both versions and the command that goes back."""
    (line,) = require_compatible(having(ON_CPU, diffusers="0.43.0"), allow_untested=False)
    assert "0.42.1" in line
    assert "0.43.0" in line
    assert 'pip install "diffusers==0.42.1"' in line


def test_flash_attn_is_said_to_be_untested():
    """No build of flash-attn could be tested, and its user is told so."""
    (line,) = require_compatible(having(ON_CPU, flash_attn="2.8.3"), allow_untested=False)
    assert "no build of flash-attn could be tested" in line


def test_all_refusals_are_listed_at_once_with_their_commands():
    """A missing package, an old one, one of the next major and a known-bad pair: one error."""
    env = without(having(ON_CPU, torch="2.4.0", transformers="6.0.0"), "safetensors")
    with pytest.raises(DitLoraError) as caught:
        require_compatible(env, allow_untested=False)
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert "run.allow_untested=true" in text.splitlines()[0]
    assert [line.split()[1] for line in text.splitlines()[1:]] == [
        "torch>=2.11,<3",
        "transformers>=5.0,<6",
        "safetensors>=0.8,<1",
        "the",  # the loss is NaN: known of torch before 2.5.1
    ]
    assert "got 6.0.0" in text
    assert "not installed" in text
    for command in ("transformers>=5.0,<6", "safetensors>=0.8,<1", "torch>=2.11,<3"):
        assert f'pip install "{command}"' in text


def test_a_cpu_build_of_torch_is_replaced_by_a_cpu_build():
    """Without its index pip would install a CUDA build."""
    (cpu,) = [p for p in problems(having(ON_CPU, torch="2.10.0+cpu")) if p.id == "torch"]
    (gpu,) = [p for p in problems(having(ON_GPU, torch="2.10.0")) if p.id == "torch"]
    assert cpu.remedy.endswith("--index-url https://download.pytorch.org/whl/cpu")
    assert gpu.remedy == 'pip install "torch>=2.11,<3"'


def test_allow_untested_turns_refusals_into_warnings():
    """The same lines that would have stopped the run are shown, and the run goes on."""
    env = having(ON_CPU, torch="3.0.0", peft="0.11.1")
    shown = require_compatible(env, allow_untested=True)
    assert [line.split()[0] for line in shown] == ["torch>=2.11,<3", "peft>=0.20,<1", "PEFT"]


KNOWN = [
    ("cudnn-sdpa-backward", ON_GPU, having(ON_GPU, torch="2.10.2")),
    ("cudnn-sdpa-backward", having(ON_GPU, torch="2.11.0"), replace(ON_GPU, devices=())),
    ("cudnn-sdpa-backward", ON_GPU, replace(ON_GPU, torch_cuda=None)),  # ROCm
    ("sdpa-before-2.5.1", having(ON_GPU, torch="2.5.0"), having(ON_GPU, torch="2.5.1")),
    ("peft-half-adapters", having(ON_CPU, peft="0.5.0"), having(ON_CPU, peft="0.4.0")),
    ("peft-half-adapters", having(ON_CPU, peft="0.11.1"), having(ON_CPU, peft="0.12.0")),
    (
        "flash-attn-cuda-12.4",
        replace(having(ON_GPU, flash_attn="2.8.3"), torch_cuda="12.4"),
        replace(having(ON_GPU, flash_attn="2.8.3"), torch_cuda="12.6"),
    ),
    (
        "flash-attn-cuda-12.4",
        replace(having(ON_GPU, flash_attn="2.8.3"), torch_cuda="12.4"),
        replace(ON_GPU, torch_cuda="12.4"),
    ),
    (
        "triton-interpreter-numpy-2.4",
        having(ON_CPU, triton="3.6.0", numpy="2.4.0"),
        having(ON_CPU, triton="3.6.0", numpy="2.3.5"),
    ),
    (
        "triton-interpreter-numpy-2.4",
        having(ON_CPU, triton="3.6.0"),
        having(ON_CPU, triton="3.7.0"),
    ),
    (
        "triton-interpreter-numpy-2.4",
        having(ON_CPU, triton="3.6.0"),
        having(ON_GPU, triton="3.6.0"),
    ),
    (
        "torchvision-of-another-torch",
        having(ON_GPU, torchvision="0.27.1"),
        having(ON_GPU, torchvision="0.28.0"),
    ),
    (
        "torchvision-of-another-torch",
        having(ON_CPU, torchvision="0.28.0"),
        having(ON_CPU, torchvision="0.28.0+cpu"),
    ),
    (
        "torchvision-of-another-torch",
        having(ON_CPU, torchvision="0.28.0"),
        replace(having(ON_CPU, torchvision="0.28.0"), platform="Linux-6.1.0-aarch64"),
    ),
]


@pytest.mark.parametrize(("bad_id", "bad", "neighbour"), KNOWN)
def test_a_known_bad_fires_on_its_combination_and_not_beside_it(bad_id, bad, neighbour):
    """Each boundary is one version, one build or one device away from a combination that passes."""
    assert bad_id in ids(bad)
    assert bad_id not in ids(neighbour)


def test_every_known_bad_has_a_case_a_source_and_a_remedy():
    """None is left out of the cases above, and each says where it was reported and what to do."""
    assert {bad.id for bad in KNOWN_BAD} == {case[0] for case in KNOWN}
    assert len({bad.id for bad in KNOWN_BAD}) == len(KNOWN_BAD)
    assert all(bad.source.startswith("https://github.com/") for bad in KNOWN_BAD)
    for bad in KNOWN_BAD:
        assert bad.remedy.startswith("pip ") == (bad.severity == "refuse")


COMMAND_LINES = [
    ("accelerate launch --num_processes 2 lora.py", 2),
    ("accelerate launch --num_processes=2 lora.py", 2),
    ("accelerate launch --num-processes 3 lora.py", 3),
    ("accelerate launch --num-processes=3 lora.py", 3),
    ("accelerate launch --cpu --num_processes 2 lora.py", 2),
    ("accelerate launch --multi-gpu --num_processes 8 -q -m package.module", 8),
    ("accelerate launch --mixed_precision bf16 -t 3 --num_processes 2 lora.py", 2),
    ("accelerate launch -t3 --num_processes 2 lora.py", 2),
    ("accelerate launch --num_processes 2 --num_processes 4 lora.py", 4),
    ("accelerate launch --num_processes 2 -- lora.py --num_processes 9", 2),
    ("/venv/bin/python /venv/bin/accelerate launch --cpu --num_processes 2 lora.py", 2),
    ("/venv/bin/python -X faulthandler /venv/bin/accelerate-launch --num_processes 2 a.py", 2),
    ("python -m accelerate.commands.launch --num_processes=2 lora.py", 2),
    ("python -m accelerate.commands.accelerate_cli launch --num_processes=2 lora.py", 2),
    ("accelerate.exe launch --num_processes 2 lora.py", 2),
    ("accelerate launch lora.py --num_processes 9", None),
    ("accelerate launch --cpu lora.py train.steps=2 --num_processes=9", None),
    ("accelerate launch --main_process_port 29501 lora.py", None),
    ("accelerate launch --num_processes two lora.py", None),
    ("accelerate launch --num_processes", None),
    ("accelerate config --num_processes 2", None),
    ("torchrun --nproc_per_node 2 lora.py", None),
    ("torchrun --nproc_per_node 2 launch --num_processes 3", None),
    ("bash", None),
    ("", None),
]


@pytest.mark.parametrize(("command", "count"), COMMAND_LINES)
def test_processes_are_read_from_an_accelerate_command_line(
    command, count, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    """Only options of `accelerate launch`, in every spelling it takes, and never the script's own."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nothing here"))
    assert processes_asked(command.split(), tmp_path) == count


@pytest.mark.parametrize("spelling", ["--config_file {}", "--config-file {}", "--config_file={}"])
@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("ddp.yaml", "distributed_type: MULTI_CPU\nnum_processes: 5\n", 5),
        ("one.yaml", "distributed_type: 'NO'\n", 1),
        ("unset.yaml", "distributed_type: MULTI_GPU\n", None),
        ("slurm.yaml", "distributed_type: MULTI_GPU\nnum_processes: -1\n", None),
        ("cloud.yaml", "compute_environment: AMAZON_SAGEMAKER\nnum_processes: 5\n", None),
        ("ddp.json", '{"distributed_type": "MULTI_CPU", "num_processes": 5}', 5),
    ],
)
def test_processes_are_read_from_a_config_file_beside_the_command(
    tmp_path: Path, spelling, name, text, count
):
    """A relative path is looked up in the folder that the command was given in."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    command = f"accelerate launch {spelling.format(name)} --cpu lora.py"
    assert processes_asked(command.split(), tmp_path) == count
    assert processes_asked(["accelerate", "launch", "--config_file", "gone.yaml"], tmp_path) is None


def test_an_option_overrules_the_config_file(tmp_path: Path):
    """As in accelerate, where options come before the file's values."""
    (tmp_path / "c.yaml").write_text("num_processes: 5\n", encoding="utf-8")
    command = "accelerate launch --config_file c.yaml --num_processes 2 lora.py"
    assert processes_asked(command.split(), tmp_path) == 2


def test_the_default_config_file_counts_except_beside_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`accelerate config` writes it; `accelerate launch --cpu` does not read it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    default_launch_config().parent.mkdir()
    default_launch_config().write_text("num_processes: 6\n", encoding="utf-8")
    assert processes_asked(["accelerate", "launch", "lora.py"], tmp_path) == 6
    assert processes_asked(["accelerate", "launch", "--cpu", "lora.py"], tmp_path) is None


def test_a_broken_config_file_is_named(tmp_path: Path):
    """Invalid YAML, a list, and a file that is not there: each error has the path."""
    (tmp_path / "bad.yaml").write_text("a: [", encoding="utf-8")
    (tmp_path / "list.yaml").write_text("- 1\n", encoding="utf-8")
    for name in ("bad.yaml", "list.yaml", "absent.yaml"):
        with pytest.raises(DitLoraError, match=name):
            read_launch_config(tmp_path / name)


@pytest.mark.parametrize("variables", [{}, {"XDG_CACHE_HOME": "/x"}, {"HF_HOME": "~/h"}])
def test_flags_and_default_file_are_those_of_the_installed_accelerate(variables):
    """A release of accelerate with another flag, or another place for its file, is noticed."""
    script = """
import json
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser
from dit_lora.compat import default_launch_config
flags = [name.lstrip("-").replace("-", "_") for action in launch_command_parser()._actions
         if action.nargs == 0 for name in action.option_strings]
print(json.dumps([sorted(set(flags)), default_config_file, str(default_launch_config())]))
"""
    environment = {"HOME": "/home/somebody", **variables}
    flags, theirs, ours = json.loads(run_python(script, environment))
    assert set(flags) == LAUNCH_FLAGS
    assert ours == theirs


def run_python(script: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment and {**environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_accelerates_cpu_trap_is_real_and_is_caught(tmp_path: Path):
    """`accelerate launch --cpu --num_processes 2` starts one process, and its script can tell."""
    script = tmp_path / "script.py"
    script.write_text(
        "import psutil\n"
        "from accelerate import Accelerator\n"
        "from dit_lora.compat import launch_problem, processes_asked\n"
        "seen, parent = Accelerator(cpu=True), psutil.Process().parent()\n"
        "asked = processes_asked(parent.cmdline(), parent.cwd())\n"
        "print(asked, seen.num_processes)\n"
        "kind = str(seen.distributed_type)\n"
        "print(launch_problem(asked, seen.num_processes, False, kind))\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*command, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    counts, problem = done.stdout.splitlines()[-2:]
    assert counts == "2 1"
    assert "torchrun --nproc_per_node 2" in problem


def test_processes_left_out_are_a_problem_with_two_ways_out():
    """Fewer processes than asked for is a problem; as many, more, or an unknown number is not."""
    problem = launch_problem(4, 1, False, "NO")
    assert problem is not None
    assert "4 processes were asked for and the run has 1" in problem
    cpu_line = "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 4"
    assert cpu_line in problem
    assert "torchrun --nproc_per_node 4" in problem
    assert launch_problem(4, 4, False, "MULTI_CPU") is None
    assert launch_problem(1, 2, False, "MULTI_CPU") is None
    assert launch_problem(None, 1, False, "NO") is None


def test_fsdp_that_is_not_in_effect_is_a_problem():
    """On a CPU Accelerate runs plain DDP where FSDP was asked for."""
    for kind in ("MULTI_CPU", "DistributedType.MULTI_CPU", "NO"):
        problem = launch_problem(2, 2, True, kind)
        assert problem is not None
        assert problem.startswith("FSDP was asked for")
    assert launch_problem(2, 2, True, "FSDP") is None
    assert launch_problem(2, 2, True, "DistributedType.FSDP") is None
    both = launch_problem(2, 1, True, "NO")
    assert both is not None
    assert len(both.splitlines()) == 2


def test_decisions_follow_the_device():
    """bf16 only on a GPU that computes in it; every decision has a reason."""
    chosen = {}
    for name, env in (
        ("cpu", ON_CPU),
        ("h100", ON_GPU),
        ("t4", replace(ON_GPU, devices=(T4,))),
    ):
        assert all(decision.why for decision in decisions(env))
        chosen[name] = {decision.what: decision.choice for decision in decisions(env)}
    assert {name: choice["dtype"] for name, choice in chosen.items()} == {
        "cpu": "fp32",
        "h100": "bf16",
        "t4": "fp32",
    }
    assert chosen["cpu"]["device"] == "cpu"
    assert "NVIDIA H100 80GB HBM3" in chosen["h100"]["device"]
    assert "79.1 GiB" in chosen["h100"]["device"]
    assert chosen["cpu"]["video"] == "PyAV 18.1.0"
    assert chosen["cpu"]["trackers"] == "none"
    both = having(ON_CPU, tensorboard="2.21.0", trackio="0.2.0")
    assert {d.what: d.choice for d in decisions(both)}["trackers"] == "tensorboard, trackio"


def test_the_probe_agrees_with_the_installed_distributions():
    """Versions are importlib.metadata's, devices are torch's, and the whole is JSON-able."""
    import torch

    env = probe_environment()
    assert env.versions["torch"] == metadata.version("torch")
    assert env.versions["av"] == metadata.version("av")
    assert env.versions["numpy"] == metadata.version("numpy")
    installed = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    for name in TESTED:
        assert (name in env.versions) == (
            name in installed or name.replace("_", "-") in installed
        ), name
    assert env.torch_cuda == torch.version.cuda
    assert len(env.devices) == torch.cuda.device_count()
    assert env.python == ".".join(map(str, sys.version_info[:3]))
    assert json.loads(json.dumps(asdict(env)))["versions"] == dict(env.versions)


def test_the_probe_works_without_torch_and_the_check_names_it():
    """A machine without torch gets a list of what to install, not a traceback."""
    script = """
import sys
sys.modules["torch"] = None
from dit_lora.compat import probe_environment
print(probe_environment().devices)
"""
    assert run_python(script) == "()"
    (problem,) = problems(without(ON_CPU, "torch"))
    assert "not installed" in str(problem)


def test_importing_compat_imports_nothing_heavy():
    """`dit-lora --help` stays instant: neither torch nor accelerate nor yaml comes with compat."""
    script = """
import sys
import dit_lora.compat
heavy = {"torch", "accelerate", "diffusers", "peft", "numpy", "yaml", "rich", "pydantic"}
print(sorted(heavy & set(sys.modules)))
"""
    assert run_python(script) == "[]"
