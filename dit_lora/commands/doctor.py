"""Report what this machine has, what is wrong with it, and what a run would use: as data and as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dit_lora.environment.versions import (
    TESTED,
    TRACKERS,
    Environment,
    VersionProblem,
    default_launch_config,
    launch_problem,
    launch_processes,
    package_status,
    problems,
    read_launch_config,
)
from dit_lora.fuse import kernel_support
from dit_lora.terminal import printable

_SHOWN = ("id", "severity", "what", "source", "remedy")


@dataclass(frozen=True)
class Decision:
    """A choice that a run will make, and why."""

    what: str
    choice: str
    why: str


def decisions(env: Environment) -> list[Decision]:
    """Return what a run in this environment uses where the recipe leaves it open."""
    gpu = env.devices[0] if env.devices else None
    trackers = ", ".join(name for name in TRACKERS if name in env.versions) or "none"
    device = "cpu", "torch finds no GPU that it can use"
    dtype = "fp32", "without bf16 instructions a CPU was 10 to 70 times slower in bf16"
    if gpu:
        device = f"cuda: {gpu.name}, {gpu.memory_gib} GiB", "torch can use this GPU"
        dtype = "fp32", "this GPU does not compute in bf16, and fp16 overflows on these models"
    if gpu and gpu.bf16:
        dtype = "bf16", "this GPU computes in it; trainable weights are fp32 all the same"
    return [
        Decision("device", *device),
        Decision("dtype", *dtype),
        Decision("attention", "PyTorch SDPA", "with a mask never cuDNN's: pytorch#196678"),
        Decision("optimizer", "torch AdamW, fused", "all trainable weights in one pass, in fp32"),
        Decision("video", f"PyAV {env.versions.get('av', '')}".strip(), "brings its own FFmpeg"),
        Decision(
            "chat frames", "prepared in torch", "Transformers' video processors need torchvision"
        ),
        Decision("trackers", trackers, "installed; run.trackers chooses among them"),
    ]


def report(env: Environment, launch_config: Path | None) -> dict[str, Any]:
    """Return a JSON-able account of an environment; `ok` is false if anything in it is refused.

    `launch_config` is an Accelerate config file; by default the one that `accelerate launch` reads.
    """
    issues = problems(env)
    launch = _launch(env, launch_config)
    return {
        "ok": not launch["problem"] and all(problem.severity != "refuse" for problem in issues),
        "python": env.python,
        "platform": env.platform,
        "packages": {name: _package(name, env, issues) for name in TESTED},
        "device": {
            "cuda_available": bool(env.devices),
            "torch_cuda": env.torch_cuda,
            "gpus": [asdict(device) for device in env.devices],
        },
        "known_bad": [
            {name: getattr(problem, name) for name in _SHOWN}
            for problem in issues
            if problem.id not in TESTED
        ],
        "launch": launch,
        "triton": kernel_support()._asdict(),
        "decisions": [asdict(decision) for decision in (*decisions(env), _kernels())],
    }


def launch_config_problem(config: Mapping[str, Any], env: Environment) -> str | None:
    """Return what `accelerate launch` would leave out, or cannot do, with these values on this machine."""
    kind = str(config.get("distributed_type") or "NO")  # YAML 1.1 reads an unquoted NO as false
    asked = launch_processes(config)
    # These kinds go to accelerate/commands/launch.py's simple_launcher, all others to torchrun.
    alone = kind in ("NO", "MULTI_CPU") and not config.get("mpirun_config")
    started = 1 if alone or asked is None else asked
    machines = config.get("num_machines", 1)
    here = started // machines if isinstance(machines, int) and machines > 0 else started
    if env.devices and here > len(env.devices):
        return (
            f"{here} processes were asked for on each machine, and this one has {len(env.devices)} "
            f"GPU(s); set num_processes to {len(env.devices)} for each machine"
        )
    return launch_problem(
        several_asked=asked is not None and asked > started,
        fsdp_asked=kind == "FSDP" and started < 2,
        processes=asked,
    )


def render(report: Mapping[str, Any]) -> None:
    """Print a report as tables, readable in 80 columns; commands are whole lines."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"Python {report['python']} on {report['platform']}\n", markup=False)
    packages = report["packages"]
    rows = [
        (name, entry["version"] or "-", entry["tested"] or "-", entry["status"])
        for name, entry in packages.items()
    ]
    console.print(table(("package", "installed", "tested", "status"), rows))
    choices = [(entry["what"], entry["choice"], entry["why"]) for entry in report["decisions"]]
    console.print(table(("a run uses", "choice", "why"), choices))
    notes = [entry for entry in packages.values() if entry["what"]] + list(report["known_bad"])
    for note in notes:
        lines = [f"{note['severity']}: {note['what']}", note.get("source"), note["remedy"]]
        console.print("\n  ".join(filter(None, lines)), markup=False, soft_wrap=True)
    triton = report["triton"]
    lines = [f"Triton: {triton['mode']}: {triton['reason']}"]
    launch = report["launch"]
    if launch["config_file"]:
        asked = launch["processes"] or "Accelerate's choice"
        lines.append(f"launch: {launch['config_file']}: processes: {asked}")
    if launch["problem"]:
        lines.append(f"refuse: {launch['problem']}")
    for line in lines:
        console.print(printable(line), markup=False, soft_wrap=True)
    console.print("ready to train" if report["ok"] else "not ready: see the lines with refuse")


def _kernels() -> Decision:
    support = kernel_support()
    choice = "fused, where parity holds" if support.mode == "gpu" else "lora_linear alone"
    return Decision("kernels", choice, support.reason)


def _package(
    name: str, env: Environment, version_problems: Sequence[VersionProblem]
) -> dict[str, Any]:
    problem = next((problem for problem in version_problems if problem.id == name), None)
    return {
        "version": env.versions.get(name),
        "tested": TESTED[name].release,
        "range": TESTED[name].requirement(name),
        "status": package_status(name, env),
        "severity": problem.severity if problem else None,
        "what": problem.what if problem else "",
        "remedy": problem.remedy if problem else "",
    }


def _launch(env: Environment, launch_config: Path | None) -> dict[str, Any]:
    path = launch_config or default_launch_config()
    if launch_config is None and not path.is_file():
        return {"config_file": None, "processes": None, "problem": None}
    config = read_launch_config(path)
    return {
        "config_file": str(path),
        "processes": launch_processes(config),
        "problem": launch_config_problem(config, env),
    }


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """Return a table without frames whose cells are shown as they are, brackets included."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
