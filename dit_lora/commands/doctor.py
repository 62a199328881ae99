"""Report what this machine has, what is wrong with it, and what a run would use: as JSON data and as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dit_lora.environment.versions import (
    TESTED,
    TRACKERS,
    Environment,
    VersionProblem,
    find_launch_problem,
    find_version_problems,
    get_default_launch_config,
    get_num_launch_processes,
    get_package_status,
    read_launch_config,
)
from dit_lora.fuse import kernel_support
from dit_lora.terminal import make_printable

_LAUNCH_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
"""Values of an Accelerate config's `distributed_type` that a run does not refuse."""
_PROBLEM_FIELDS = ("id", "severity", "what", "source", "remedy")


@dataclass(frozen=True)
class EnvironmentDecision:
    """One choice that a run will make in this environment, and the reason."""

    what: str
    choice: str
    why: str


def list_environment_decisions(env: Environment) -> list[EnvironmentDecision]:
    """List the choices of a run in this environment that the recipe leaves open."""
    # The first GPU decides for all: a machine usually has equal ones.
    gpu = env.devices[0] if env.devices else None
    trackers = ", ".join(name for name in TRACKERS if name in env.versions) or "none"
    device = "cpu", "torch finds no usable GPU"
    dtype = "fp32", "without bf16 instructions a CPU was 10 to 70 times slower in bf16"
    if gpu:
        device = f"cuda: {gpu.name}, {gpu.memory_gib} GiB", "torch can use this GPU"
        dtype = "fp32", "this GPU does not compute in bf16, and fp16 overflows on these models"
    if gpu and gpu.bf16:
        dtype = "bf16", "this GPU computes in it; trainable weights stay in fp32"
    return [
        EnvironmentDecision("device", *device),
        EnvironmentDecision("dtype", *dtype),
        _describe_platform(env),
        EnvironmentDecision("attention", "PyTorch SDPA", "never cuDNN with a mask: pytorch#196678"),
        EnvironmentDecision("optimizer", "torch AdamW, fused", "all trainable weights in one pass, in fp32"),
        EnvironmentDecision("video", f"PyAV {env.versions.get('av', '')}".strip(), "brings its own FFmpeg"),
        EnvironmentDecision("chat frames", "prepared in torch", "Transformers' video processors need torchvision"),
        EnvironmentDecision("trackers", trackers, "installed; choose with run.trackers"),
    ]


def _describe_platform(env: Environment) -> EnvironmentDecision:
    """Describe how well this operating system and kind of GPU are tested."""
    # As `platform.platform` begins: Linux, macOS or Windows.
    system = env.platform.partition("-")[0]
    if system == "Windows":
        return EnvironmentDecision("platform", system, "not tested: use WSL 2, which is Linux")
    if system == "macOS":
        return EnvironmentDecision(
            "platform", system, "not tested; dit-lora train uses the CPU, and not the GPU (MPS)"
        )
    if env.get_build_label("torch").startswith("rocm"):
        return EnvironmentDecision("platform", f"{system}, ROCm", "not tested: try a smoke recipe first")
    return EnvironmentDecision("platform", system, "tested on CPUs and NVIDIA GPUs")


def build_report(env: Environment, launch_config: Path | None) -> dict[str, Any]:
    """JSON-compatible report on an environment; `ok` is False if a run would be refused.

    Args:
        env: The environment.
        launch_config: An Accelerate config file; None for the one that `accelerate launch` reads.
    """
    issues = find_version_problems(env)
    launch = _describe_launch(env, launch_config)
    kernels = kernel_support()
    # If the recipe does not set them.
    kernel_choice = "fused, where parity holds" if kernels.mode == "gpu" else "lora_linear only"
    decisions = [*list_environment_decisions(env), EnvironmentDecision("kernels", kernel_choice, kernels.reason)]
    return {
        "ok": not launch["problem"] and all(problem.severity != "refuse" for problem in issues),
        "python": env.python,
        "platform": env.platform,
        "packages": {name: _describe_package(name, env, issues) for name in TESTED},
        "device": {
            "cuda_available": bool(env.devices),
            "torch_cuda": env.torch_cuda,
            "gpus": [asdict(device) for device in env.devices],
        },
        "known_bad": [
            {name: getattr(problem, name) for name in _PROBLEM_FIELDS}
            for problem in issues
            # A problem of a single package has the package's name as id, and is reported with the package.
            if problem.id not in TESTED
        ],
        "launch": launch,
        "triton": kernels._asdict(),
        "decisions": [asdict(decision) for decision in decisions],
    }


def find_launch_config_problem(config: Mapping[str, Any], env: Environment) -> str | None:
    """Message on what `accelerate launch` would ignore, or cannot do, with this config on this machine.

    None if nothing.
    """
    kind = str(config.get("distributed_type") or "NO")  # YAML 1.1 reads an unquoted NO as false
    # The config of a cloud job has kinds of its own.
    if kind not in _LAUNCH_KINDS and config.get("compute_environment", "LOCAL_MACHINE") == "LOCAL_MACHINE":
        return f"distributed_type {kind} is not supported; give one of {', '.join(_LAUNCH_KINDS)}"
    requested = get_num_launch_processes(config)
    # accelerate/commands/launch.py starts these kinds with simple_launcher, all others with torchrun.
    is_single = kind in ("NO", "MULTI_CPU") and not config.get("mpirun_config")
    # The number of processes that Accelerate really starts.
    started = 1 if is_single or requested is None else requested
    machines = config.get("num_machines", 1)
    # num_processes counts all machines together.
    num_per_machine = started // machines if isinstance(machines, int) and machines > 0 else started
    if env.devices and num_per_machine > len(env.devices):
        return (
            f"the launch has {num_per_machine} processes for each machine, and this one has "
            f"{len(env.devices)} GPU(s); set num_processes to {len(env.devices)} for each machine"
        )
    return find_launch_problem(
        is_multiple_requested=requested is not None and requested > started,
        is_fsdp_requested=kind == "FSDP" and started < 2,
        num_processes=requested,
    )


def print_report(report: Mapping[str, Any]) -> None:
    """Print an environment report as tables, readable in 80 columns. Commands are never wrapped."""
    from rich.console import Console

    # Without highlighting, which would colour numbers and paths.
    console = Console(highlight=False)
    console.print(f"Python {report['python']} on {report['platform']}\n", markup=False)
    packages = report["packages"]
    # A missing value is shown as a dash.
    rows = [
        (name, entry["version"] or "-", entry["tested"] or "-", entry["status"]) for name, entry in packages.items()
    ]
    console.print(build_table(("package", "installed", "tested", "status"), rows))
    choices = [(entry["what"], entry["choice"], entry["why"]) for entry in report["decisions"]]
    console.print(build_table(("a run uses", "choice", "why"), choices))
    # Both have a severity, a description and a remedy.
    notes = [entry for entry in packages.values() if entry["what"]] + list(report["known_bad"])
    for note in notes:
        lines = [f"{note['severity']}: {note['what']}", note.get("source"), note["remedy"]]
        console.print("\n  ".join(filter(None, lines)), markup=False, soft_wrap=True)
    triton = report["triton"]
    lines = [f"Triton: {triton['reason']}" + (" (kernels are off)" if triton["mode"] == "none" else "")]
    launch = report["launch"]
    if launch["config_file"]:
        requested = launch["processes"] or "Accelerate's choice"
        lines.append(f"launch: {launch['config_file']}: processes: {requested}")
    if launch["problem"]:
        lines.append(f"refuse: {launch['problem']}")
    for line in lines:
        console.print(make_printable(line), markup=False, soft_wrap=True)
    console.print("ready to train" if report["ok"] else "not ready to train: correct the lines marked refuse")


def _describe_package(name: str, env: Environment, version_problems: Sequence[VersionProblem]) -> dict[str, Any]:
    problem = next((problem for problem in version_problems if problem.id == name), None)
    return {
        "version": env.versions.get(name),
        "tested": TESTED[name].tested_version,
        "range": TESTED[name].format_requirement(name),
        "status": get_package_status(name, env),
        "severity": problem.severity if problem else None,
        "what": problem.what if problem else "",
        "remedy": problem.remedy if problem else "",
    }


def _describe_launch(env: Environment, launch_config: Path | None) -> dict[str, Any]:
    path = launch_config or get_default_launch_config()
    # The default config is optional; a file that the user names must exist.
    if launch_config is None and not path.is_file():
        return {"config_file": None, "processes": None, "problem": None}
    config = read_launch_config(path)
    return {
        "config_file": str(path),
        "processes": get_num_launch_processes(config),
        "problem": find_launch_config_problem(config, env),
    }


def build_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """A table without borders. Cells are shown literally, including brackets."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
