"""Versions are judged by what was tested, and what a launcher leaves out is said with a way to have it."""

import json
import runpy
import subprocess
import sys
import tomllib
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import pytest
from accelerate.commands.config import config_args
from packaging.requirements import Requirement
from packaging.version import Version

from dit_lora.commands.doctor import list_environment_decisions
from dit_lora.environment.versions import (
    KNOWN_BAD,
    TESTED,
    Device,
    Environment,
    find_launch_problem,
    find_version_problems,
    get_default_launch_config,
    get_num_launch_processes,
    get_package_status,
    probe_environment,
    read_launch_config,
    require_compatible_versions,
)
from dit_lora.errors import DitLoraError

ROOT = Path(__file__).parents[3]
H100 = Device("NVIDIA H100 80GB HBM3", 79.1, bf16=True)
T4 = Device("Tesla T4", 14.6, bf16=False)


def having(env: Environment, changes: str) -> Environment:
    """The environment with other versions, `torch=2.4.0 triton=none`, cuda=, or machine=."""
    versions = dict(env.versions)
    for name, _, value in (change.partition("=") for change in changes.split()):
        if name == "cuda":
            env = replace(env, torch_cuda=None if value == "none" else value)
        elif name == "machine":
            env = replace(env, platform=f"Linux-6.1.0-{value}-with-glibc2.36")
        elif value == "none":
            del versions[name]
        else:
            versions[name] = value
    return replace(env, versions=versions)


def ids(env: Environment) -> set[str]:
    return {problem.id for problem in find_version_problems(env)}


ON_CPU = having(
    Environment("3.11.9", "Linux-6.1.0-x86_64-with-glibc2.36", {}),
    "torch=2.13.0+cpu diffusers=0.42.1 transformers=5.23.0 peft=0.21.2 accelerate=1.15.0 "
    "huggingface_hub=2.4.0 safetensors=0.8.0 av=18.1.0 numpy=2.4.6",
)
ON_GPU = replace(having(ON_CPU, "torch=2.13.0 cuda=13.0"), devices=(H100,))
NO_GPU = replace(ON_GPU, devices=())  # torch for CUDA on a machine without a GPU


def test_the_tested_set_gives_no_warning():
    """Optional packages may be absent, and what the run handles itself is listed without a warning."""
    assert find_version_problems(ON_CPU) == []
    assert get_package_status("triton", ON_CPU) == "absent"
    assert [(p.id, p.severity) for p in find_version_problems(ON_GPU)] == [("cudnn-sdpa-backward", "handled")]
    assert require_compatible_versions(ON_GPU, allow_untested=False) == []


def test_floors_are_those_of_pyproject():
    """A floor changed in pyproject.toml alone, or here alone, is noticed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = ("flash-attn", "liger", "bitsandbytes", "deepspeed", "prodigy")
    optional = [line for name in names for line in extras[name]]
    lines = [*project["dependencies"], *optional]
    floors = {}
    for requirement in map(Requirement, lines):
        (floors[requirement.name],) = (Version(part.version) for part in requirement.specifier)
    checked = [name for name in TESTED if name != "triton"]  # torch decides on Triton
    for name in checked:
        assert Version(TESTED[name].min_version) == floors[name], name
    required = {Requirement(line).name for line in project["dependencies"]}
    assert {name for name in TESTED if TESTED[name].required} == required & set(TESTED)


JUDGED = {
    "tested": "torch=2.13.0+cu126 triton=3.9.0",
    "in range": "torch=2.11.0+cu130 torch=2.13.1 torch=2.14.0.dev20260901 torch=2.15.1 diffusers=0.42.0 av=17.1.0",
    "untested": "torch=2.16.0 torch=2.16.0.dev20260901 diffusers=0.43.0 av=18.2.0 flash-attn=2.8.3",
    "refused": "torch=2.10.9 torch=3.0.0 torch=3.0.0.dev20260901 torch=nonsense diffusers=0.41.0 "
    "diffusers=1.0.0 av=19.0.0 bitsandbytes=0.44.1 flash-attn=3.0.0",
}


@pytest.mark.parametrize(
    ("change", "status"),
    [(change, status) for status, changes in JUDGED.items() for change in changes.split()],
)
def test_a_version_is_judged_by_floor_tested_release_and_next_major(change, status):
    """Below the floor and from the next major on is refused; a newer minor is untested."""
    env, name = having(ON_CPU, change), change.partition("=")[0]
    assert get_package_status(name, env) == status
    severities = [problem.severity for problem in find_version_problems(env) if problem.id == name]
    assert severities == {"refused": ["refuse"], "untested": ["warn"]}.get(status, [])


def test_an_untested_version_warns_and_names_what_was_tested():
    """The run goes on; the line names both versions, or that no build could be tested."""
    (line,) = require_compatible_versions(having(ON_CPU, "diffusers=0.43.0"), allow_untested=False)
    for part in ("0.42.1", "0.43.0", 'pip install "diffusers==0.42.1"'):
        assert part in line
    (line,) = require_compatible_versions(having(ON_CPU, "torch=2.16.0+cpu"), allow_untested=False)
    assert "torch was tested up to 2.15.0; got 2.16.0+cpu" in line
    assert 'pip install "torch==2.13.0" --index-url' in line  # the set that is tested as a whole
    (line,) = require_compatible_versions(having(ON_CPU, "flash-attn=2.8.3"), allow_untested=False)
    assert "flash-attn was never tested" in line


def test_all_refusals_are_listed_at_once_and_allow_untested_passes_them():
    """A missing package, an old one, one of the next major and a known-bad pair: one error."""
    env = having(ON_CPU, "torch=2.4.0 transformers=6.0.0 safetensors=none")
    with pytest.raises(DitLoraError) as error:
        require_compatible_versions(env, allow_untested=False)
    text = str(error.value)
    assert error.value.exit_code == 2
    assert "run.allow_untested=true" in text.splitlines()[0]
    assert [line.split()[1] for line in text.splitlines()[1:]] == [
        "torch>=2.11,<3",
        "transformers>=5.17,<6",
        "safetensors>=0.8,<1",
        "the",  # the loss is NaN: known of torch before 2.5.1
    ]
    assert "got 6.0.0" in text
    for command in ("transformers>=5.17,<6", "safetensors>=0.8,<1", "torch>=2.11,<3"):
        assert f'pip install "{command}"' in text
    # With allow_untested the same lines are warnings, and the run goes on.
    assert [f"  - {line}" for line in require_compatible_versions(env, True)] == text.splitlines()[1:]


def test_a_cpu_build_of_torch_is_replaced_by_a_cpu_build():
    """Without its index pip would install a CUDA build."""
    (cpu,) = [p for p in find_version_problems(having(ON_CPU, "torch=2.10.0+cpu")) if p.id == "torch"]
    (gpu,) = [p for p in find_version_problems(having(ON_GPU, "torch=2.10.0")) if p.id == "torch"]
    assert cpu.remedy.endswith("--index-url https://download.pytorch.org/whl/cpu")
    assert gpu.remedy == 'pip install "torch>=2.11,<3"'


VISION = "torchvision-of-another-torch"
KNOWN = [
    ("cudnn-sdpa-backward", ON_GPU, "", ON_GPU, "torch=2.10.2"),
    ("cudnn-sdpa-backward", ON_GPU, "torch=2.11.0", NO_GPU, "torch=2.11.0"),
    ("cudnn-sdpa-backward", ON_GPU, "", ON_GPU, "cuda=none"),  # ROCm
    ("sdpa-before-2.5.1", ON_GPU, "torch=2.5.0", ON_GPU, "torch=2.5.1"),
    ("peft-half-adapters", ON_CPU, "peft=0.5.0", ON_CPU, "peft=0.4.0"),
    ("peft-half-adapters", ON_CPU, "peft=0.11.1", ON_CPU, "peft=0.12.0"),
    ("flash-attn-cuda-12.4", ON_GPU, "flash-attn=2.8.3 cuda=12.4", ON_GPU, "cuda=12.4"),
    ("flash-attn-cuda-12.4", ON_GPU, "flash-attn=2.8.3 cuda=12.4", ON_GPU, "flash-attn=2.8.3"),
    (VISION, ON_GPU, "torchvision=0.27.1", ON_GPU, "torchvision=0.28.0"),
    (VISION, ON_CPU, "torchvision=0.28.0", ON_CPU, "torchvision=0.28.0+cpu"),
    (VISION, ON_CPU, "torchvision=0.28.0", ON_CPU, "torchvision=0.28.0 machine=aarch64"),
]


@pytest.mark.parametrize(("bad_id", "bad", "changes", "good", "neighbour"), KNOWN)
def test_a_known_bad_fires_on_its_combination_and_not_beside_it(bad_id, bad, changes, good, neighbour):
    """Each boundary is one version, one build or one device away from a combination that passes."""
    assert bad_id in ids(having(bad, changes))
    assert bad_id not in ids(having(good, neighbour))


def test_every_known_bad_has_a_case_a_source_and_a_remedy():
    """None is left out of the cases above, and each says where it was reported and what to do."""
    assert {bad.id for bad in KNOWN_BAD} == {case[0] for case in KNOWN}
    assert len({bad.id for bad in KNOWN_BAD}) == len(KNOWN_BAD)
    assert all(bad.source.startswith("https://github.com/") for bad in KNOWN_BAD)
    for bad in KNOWN_BAD:
        assert bad.remedy.startswith("pip ") == (bad.severity == "refuse")


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
def test_processes_are_read_from_a_config_file(tmp_path: Path, name: str, text: str, count: int | None):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert get_num_launch_processes(read_launch_config(tmp_path / name)) == count


def test_a_broken_config_file_is_named(tmp_path: Path):
    """Invalid YAML, a list, and a file that is not there: each error has the path."""
    (tmp_path / "bad.yaml").write_text("a: [", encoding="utf-8")
    (tmp_path / "list.yaml").write_text("- 1\n", encoding="utf-8")
    for name in ("bad.yaml", "list.yaml", "absent.yaml"):
        with pytest.raises(DitLoraError, match=name):
            read_launch_config(tmp_path / name)


@pytest.mark.parametrize("variables", [{}, {"XDG_CACHE_HOME": "/x"}, {"HF_HOME": "~/h"}])
def test_the_default_file_is_that_of_the_installed_accelerate(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """A release of accelerate with another place for its file is noticed."""
    for name in ("XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/somebody", **variables}.items():
        monkeypatch.setenv(name, value)
    # Accelerate reads the environment when the module is run.
    accelerate_module = runpy.run_module(config_args.__name__)
    assert str(get_default_launch_config()) == accelerate_module["default_config_file"]


def run_python(script: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[-1]


def test_processes_left_out_are_a_problem_with_two_ways_out():
    problem = find_launch_problem(is_multiple_requested=True, is_fsdp_requested=False, num_processes=4)
    assert problem is not None
    assert problem.startswith("4 processes were asked for and the run has 1")
    assert "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 4" in problem
    assert "torchrun --nproc_per_node 4" in problem
    unknown = find_launch_problem(is_multiple_requested=True, is_fsdp_requested=False)
    assert unknown is not None
    assert unknown.startswith("several processes were asked for and the run has 1")
    assert "torchrun --nproc_per_node 2" in unknown
    assert find_launch_problem(is_multiple_requested=False, is_fsdp_requested=False, num_processes=1) is None


def test_fsdp_that_is_not_in_effect_is_a_problem():
    """One process has nobody to share weights with."""
    message = find_launch_problem(is_multiple_requested=True, is_fsdp_requested=True) or ""
    assert len(message.splitlines()) == 2
    assert "FSDP needs several processes" in (
        find_launch_problem(is_multiple_requested=False, is_fsdp_requested=True) or ""
    )


def test_decisions_follow_the_device():
    """bf16 only on a GPU that computes in it; every decision has a reason."""
    choices_by_environment = {}
    for name, env in {"cpu": ON_CPU, "h100": ON_GPU, "t4": replace(ON_GPU, devices=(T4,))}.items():
        assert all(decision.why for decision in list_environment_decisions(env))
        choices_by_environment[name] = {decision.what: decision.choice for decision in list_environment_decisions(env)}
    dtypes = {name: choice["dtype"] for name, choice in choices_by_environment.items()}
    assert dtypes == {"cpu": "fp32", "h100": "bf16", "t4": "fp32"}
    assert choices_by_environment["cpu"]["device"] == "cpu"
    assert "NVIDIA H100 80GB HBM3" in choices_by_environment["h100"]["device"]
    assert "79.1 GiB" in choices_by_environment["h100"]["device"]
    assert choices_by_environment["cpu"]["video"] == "PyAV 18.1.0"
    assert choices_by_environment["cpu"]["trackers"] == "none"
    environment = having(ON_CPU, "tensorboard=2.21.0 trackio=0.2.0")
    assert {d.what: d.choice for d in list_environment_decisions(environment)}["trackers"] == "tensorboard, trackio"


def test_the_probe_agrees_with_the_installed_distributions():
    """Versions are importlib.metadata's, devices are torch's, and the whole is JSON-able."""
    import torch

    env = probe_environment()
    for name in ("torch", "av", "numpy"):
        assert env.versions[name] == metadata.version(name)
    names = {distribution.name.replace("-", "_") for distribution in metadata.distributions()}
    for name in TESTED:
        assert (name in env.versions) == (name.replace("-", "_") in names), name
    assert env.torch_cuda == torch.version.cuda
    assert len(env.devices) == torch.cuda.device_count()
    assert env.python == ".".join(map(str, sys.version_info[:3]))
    assert json.loads(json.dumps(asdict(env)))["versions"] == dict(env.versions)


def test_the_probe_works_without_torch_and_the_check_names_it():
    """A machine without torch gets a list of what to install, not a traceback."""
    script = """
import sys
sys.modules["torch"] = None
from dit_lora.environment.versions import probe_environment
print(probe_environment().devices)
"""
    assert run_python(script) == "()"
    (problem,) = find_version_problems(having(ON_CPU, "torch=none"))
    assert "not installed" in str(problem)


def test_importing_compat_imports_nothing_heavy():
    """`dit-lora --help` stays instant: neither torch nor accelerate nor yaml comes with the versions."""
    script = """
import sys
import dit_lora.environment.versions
heavy = {"torch", "accelerate", "diffusers", "peft", "numpy", "yaml", "rich", "pydantic"}
print(sorted(heavy & set(sys.modules)))
"""
    assert run_python(script) == "[]"
