"""Check an environment: tested versions, known-bad combinations, and launches that start fewer processes than asked.

Only `probe_environment` reads the machine. Everything else is a function of the `Environment` that it returns, or of
an Accelerate config file, so that any machine can be checked from any other.
"""

import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from dit_lora.errors import DitLoraError, format_list

Severity = Literal["refuse", "warn", "handled"]
Status = Literal["tested", "in range", "untested", "refused", "missing", "absent"]
Release = tuple[int, int, int]
TRACKERS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class TestedVersions:
    """Supported versions of a package: the minimum, the tested ones, and the first major version that is refused."""

    min_version: str
    tested_version: str | None  # the one in constraints.txt; None if no build could be tested
    first_refused_major: int
    required: bool = True
    newer_tested_version: str | None = None  # the newest that passed the tests, if newer than `tested_version`

    @property
    def newest_tested_version(self) -> str | None:
        """The newest release of a package that the tests passed with; None if no build could be tested."""
        return self.newer_tested_version or self.tested_version

    def format_requirement(self, name: str) -> str:
        """Supported version range of a package in pip's syntax, such as `torch>=2.4,<3`."""
        return f"{name}>={self.min_version},<{self.first_refused_major}"


TESTED: Mapping[str, TestedVersions] = {
    "torch": TestedVersions("2.11", "2.13.0", 3, newer_tested_version="2.15.0"),
    "diffusers": TestedVersions("0.42", "0.42.1", 1),
    "transformers": TestedVersions("5.17", "5.23.0", 6),
    "peft": TestedVersions("0.20", "0.21.2", 1),
    "accelerate": TestedVersions("1.15", "1.15.0", 2),
    "huggingface_hub": TestedVersions("1.32", "2.4.0", 3),
    "safetensors": TestedVersions("0.8", "0.8.0", 1),
    "av": TestedVersions("17.1", "18.1.0", 19),  # 19 hangs in forked workers that read clips
    # The oldest version is the one that torch 2.11 pins.
    "triton": TestedVersions("3.6", "3.9.0", 4, required=False),
    "flash-attn": TestedVersions("2.7", None, 3, required=False),
    "liger-kernel": TestedVersions("0.8.5", "0.8.5", 1, required=False),
    "bitsandbytes": TestedVersions("0.50", "0.50.2", 1, required=False),
    "deepspeed": TestedVersions("0.19.8", "0.19.8", 1, required=False),
    "prodigyopt": TestedVersions("1.1.2", "1.1.2", 2, required=False),
}


@dataclass(frozen=True)
class Device:
    """Description of one GPU. `bf16` is true if it computes in bf16 natively, not by emulation."""

    name: str
    memory_gib: float
    bf16: bool


@dataclass(frozen=True)
class Environment:
    """Versions and devices of a run; `dataclasses.asdict` of it is JSON."""

    python: str
    platform: str
    versions: Mapping[str, str]  # an absent distribution has no entry
    torch_cuda: str | None = None  # the CUDA version that torch was built for
    devices: tuple[Device, ...] = ()  # GPUs that torch can use; empty for a CPU run

    def get_release(self, name: str) -> Release | None:
        """Release number of an installed package as three integers; for a nightly, that of the release it precedes.

        None if the package is not installed, or its version cannot be parsed.
        """
        try:
            return _parse_release(self.versions[name])
        except (KeyError, InvalidVersion):
            return None

    def get_build_label(self, name: str) -> str:
        """Build label of an installed package, after the plus sign: `cpu` for 2.13.0+cpu."""
        return self.versions.get(name, "").partition("+")[2]


_get_installed_version = cache(metadata.version)
"""The version of an installed distribution, cached: every run and every bundle reads all of them."""


def probe_environment() -> Environment:
    """Read the environment of this process. Imports torch; without it, CUDA version and devices are left out."""
    # Every tested package, and those that only the diagnosis needs.
    versions = {}
    for name in (*TESTED, "numpy", "torchvision", *TRACKERS):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = _get_installed_version(name)
    cuda, devices = None, []
    try:
        import torch
    except ModuleNotFoundError as error:
        # A module that torch itself needs is missing: the installation is broken, which must be seen.
        if error.name != "torch":
            raise
    else:
        cuda = torch.version.cuda
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            gpu = torch.cuda.get_device_properties(index)
            # As torch.cuda.is_bf16_supported(including_emulation=False), which asks one device only.
            # ROCm's GPUs, and NVIDIA's since compute capability 8.0 (Ampere).
            bf16 = torch.version.hip is not None or gpu.major >= 8
            devices.append(Device(gpu.name, round(gpu.total_memory / 2**30, 1), bf16))
    return Environment(platform.python_version(), platform.platform(), versions, cuda, tuple(devices))


@dataclass(frozen=True)
class VersionProblem:
    """A package version that is wrong or untested, and the command that changes it."""

    id: str
    severity: Severity
    what: str
    remedy: str
    source: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.what, self.source, self.remedy)))


@dataclass(frozen=True, kw_only=True)
class KnownBadVersions(VersionProblem):
    """A combination of package versions with a known defect, and the workaround."""

    matches: Callable[[Environment], bool]


def _parse_release(version: str) -> Release:
    # Versions such as 2.11 have two numbers: pad with zeros.
    release = Version(version).release
    return (*release, 0, 0)[:3]  # type: ignore[return-value]


def _is_within(env: Environment, name: str, low: Release, high: Release | None = None) -> bool:
    """True if low <= installed < high for a package's version; False if it is not installed."""
    release = env.get_release(name)
    # Without an upper bound, any later version.
    return release is not None and low <= release < (high or (10**6, 0, 0))


def _has_mismatched_torchvision(env: Environment) -> bool:
    """True if torchvision does not belong to this torch: torchvision 0.(n + 15) requires torch 2.n."""
    torch, vision = env.get_release("torch"), env.get_release("torchvision")
    # Other numbering schemes are not compared.
    if torch is None or vision is None or torch[0] != 2 or vision[0] != 0:
        return False
    # PyPI's wheel for x86-64 Linux links to CUDA, and fails with a CPU build of torch.
    on_pc = "Linux" in env.platform and "x86_64" in env.platform
    # torch has the label cpu and torchvision has not.
    cuda_on_cpu = on_pc and env.get_build_label("torch") == "cpu" != env.get_build_label("torchvision")
    return vision[1] != torch[1] + 15 or cuda_on_cpu


KNOWN_BAD: tuple[KnownBadVersions, ...] = (
    KnownBadVersions(
        "cudnn-sdpa-backward",
        "handled",
        "cuDNN's attention backward gives NaN gradients with a mask (reported on H100 and H200)",
        "nothing to do: attention with a mask is kept off cuDNN",
        "https://github.com/pytorch/pytorch/issues/196678",
        matches=lambda env: bool(env.torch_cuda and env.devices) and _is_within(env, "torch", (2, 11, 0)),
    ),
    KnownBadVersions(
        "sdpa-before-2.5.1",
        "refuse",
        "the loss is NaN from the first step; torch 2.5.1 cured it for most who reported it",
        f'pip install "{TESTED["torch"].format_requirement("torch")}"',
        "https://github.com/huggingface/finetrainers/issues/143",
        matches=lambda env: _is_within(env, "torch", (0, 0, 0), (2, 5, 1)),
    ),
    KnownBadVersions(
        "peft-half-adapters",
        "refuse",
        "PEFT 0.5 to 0.11 makes half-precision adapters, and in fp16 AdamW's eps of 1e-8 is zero",
        f'pip install "{TESTED["peft"].format_requirement("peft")}"',
        "https://github.com/huggingface/peft/pull/1706",
        matches=lambda env: _is_within(env, "peft", (0, 5, 0), (0, 12, 0)),
    ),
    KnownBadVersions(
        "flash-attn-cuda-12.4",
        "refuse",
        "with flash-attn on CUDA 12.4 a DiT's loss was reported to turn NaN after some epochs",
        "pip uninstall -y flash-attn",
        "https://github.com/NUS-HPC-AI-Lab/VideoSys/issues/107",
        matches=lambda env: "flash-attn" in env.versions and env.torch_cuda == "12.4",
    ),
    KnownBadVersions(
        "torchvision-of-another-torch",
        "refuse",
        "not built for this torch: T5's import fails, operator torchvision::nms does not exist",
        "pip uninstall -y torchvision",
        "https://github.com/pytorch/vision/issues/8985",
        matches=_has_mismatched_torchvision,
    ),
)


def get_package_status(name: str, env: Environment) -> Status:
    """Support status of an installed package: `tested`, `in range`, `untested`, `refused`, or `missing` and `absent`.

    `in range` goes from the minimum to the newest tested minor version, and `untested` is newer. Without the package,
    a required one is `missing` and an optional one `absent`.
    """
    tested = TESTED[name]
    if name not in env.versions:
        return "missing" if tested.required else "absent"
    release = env.get_release(name)
    if release is None or not _parse_release(tested.min_version) <= release < (tested.first_refused_major, 0, 0):
        return "refused"
    # Patch releases of a tested minor version do not count as untested.
    if tested.newest_tested_version is None or release[:2] > _parse_release(tested.newest_tested_version)[:2]:
        return "untested"
    # The version in constraints.txt.
    exact = tested.tested_version is not None and release == _parse_release(tested.tested_version)
    return "tested" if exact else "in range"


def find_version_problems(env: Environment) -> list[VersionProblem]:
    """Problems of the installed packages: versions outside their range, untested ones, and known-bad combinations."""
    # None for packages without a problem.
    versions = (_find_version_problem(name, env) for name in TESTED)
    return [*filter(None, versions), *(bad for bad in KNOWN_BAD if bad.matches(env))]


def require_compatible_versions(env: Environment, allow_untested: bool) -> list[str]:
    """Check the installed versions; returns warnings, or raises one `DitLoraError` that lists all refused versions.

    With `allow_untested`, refusals are returned as warnings. Problems that the run handles are left out.
    """
    issues = find_version_problems(env)
    # All at once, so that one command can correct them.
    refused = [str(problem) for problem in issues if problem.severity == "refuse"]
    if refused and not allow_untested:
        raise DitLoraError(format_list("refused before any work; run.allow_untested=true goes on anyway", refused))
    return [str(problem) for problem in issues if problem.severity != "handled"]


def _find_version_problem(name: str, env: Environment) -> VersionProblem | None:
    tested, status, version = TESTED[name], get_package_status(name, env), env.versions.get(name)
    if status in ("tested", "in range", "absent"):
        return None
    # There is no version to recommend, so the remedy is to remove the package.
    if status == "untested" and tested.tested_version is None:
        message = f"{name} was never tested; got {version}"
        return VersionProblem(name, "warn", message, f"to do without it: pip uninstall -y {name}")
    if status == "untested":
        message = f"{name} was tested up to {tested.newest_tested_version}; got {version}"
        return VersionProblem(name, "warn", message, _format_install_command(f"{name}=={tested.tested_version}", env))
    # From here on the package is missing, or outside of its range.
    requirement = tested.format_requirement(name)
    received = f"got {version}" if version else "it is not installed"
    return VersionProblem(
        name, "refuse", f"{requirement} is needed; {received}", _format_install_command(requirement, env)
    )


def _format_install_command(requirement: str, env: Environment) -> str:
    command = f'pip install "{requirement}"'
    if requirement.startswith("torch") and env.get_build_label("torch") == "cpu":
        command += " --index-url https://download.pytorch.org/whl/cpu"  # else pip changes the build
    return command


def find_launch_problem(
    *, is_multiple_requested: bool, is_fsdp_requested: bool, num_processes: int | None = None
) -> str | None:
    """Message if a launcher starts one process although more, or FSDP, was requested; None if nothing was lost.

    `num_processes` is the number requested, if known.
    """
    # The number for the commands in the message: at least 2, so that they start several processes.
    count = max(2, num_processes or 0)
    lines = []
    if is_multiple_requested:
        lines.append(
            f"{num_processes or 'several'} processes were asked for and the run has 1: accelerate launch starts a "
            "single process, in silence, for --cpu and for distributed_type MULTI_CPU or NO; "
            f"use on GPUs `accelerate launch --multi_gpu --num_processes {count}`, on a CPU "
            f"`ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {count}` "
            f"or `torchrun --nproc_per_node {count}`"
        )
    if is_fsdp_requested:
        lines.append(
            "FSDP needs several processes, and this run has one; remove FSDP, or start one process for each "
            "GPU with num_processes in accelerate_configs/fsdp2.yaml, or on a CPU `ACCELERATE_USE_FSDP=true "
            f"FSDP_VERSION=2 torchrun --nproc_per_node {count}`"
        )
    return "\n".join(lines) or None


def get_default_launch_config() -> Path:
    """The file that `accelerate launch` reads by default; it may not exist."""
    # As in accelerate/commands/config/config_args.py.
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def read_launch_config(path: Path) -> dict[str, Any]:
    """Read an Accelerate config file (YAML or JSON). Raises `DitLoraError` if it cannot be read."""
    from dit_lora.config.yaml_parsing import read_yaml  # which brings PyYAML

    try:
        values = read_yaml(path)  # reads JSON too
    except FileNotFoundError as error:
        raise DitLoraError(
            f"the Accelerate config {path} does not exist; `dit-lora init RECIPE DIR` writes one, such as one_gpu.yaml"
        ) from error
    except OSError as error:
        raise DitLoraError(f"cannot read the Accelerate config {path}: {error.strerror}") from error
    if not isinstance(values, dict):
        raise DitLoraError(f"{path} must contain keys such as num_processes; got {values!r}")
    return values


def get_num_launch_processes(config: Mapping[str, Any]) -> int | None:
    """Number of processes that an Accelerate config file asks for; None if it does not say."""
    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        return None  # the config of a cloud job: it does not apply to this machine
    default = 1 if config.get("distributed_type") == "NO" else -1  # as Accelerate's config_args.py
    count = config.get("num_processes", default)
    # The file may hold anything, such as a text for the number.
    return count if isinstance(count, int) and count > 0 else None
