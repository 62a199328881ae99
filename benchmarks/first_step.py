"""Time to the first step and after the last: a published script, our recipe before and after a change, check by check.

    python -m benchmarks.first_step [--before FOLDER] [--work FOLDER] [--rounds 2] [--steps 5] [--layers 12]
                                    [--size HEIGHT WIDTH]

A CogVideoX of random weights with steps of about two seconds on one core, six clips. `bare` is
`benchmarks.bare_start`. Our runs read a cache in which captions and clips are encoded, one per tree. `first` finds
only the encoded clips there, `again` is a second start that also finds the results of the first one's checks, and
`unchecked` has preflight, eval loss, statistics and samples off. The column `beside` is the work between the
first and the second step: eval loss and samples of the base. The last comparison of kernels counts as after the
last step. `--before` is another checkout, whose `recipes/lora.py` runs too. The runs of a round follow each other, and
medians are taken over rounds. Process CPU time is given with wall time, and is the only useful one on a busy machine.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
UNCHECKED = (
    "guard.preflight=false",
    "guard.parity_every=0",
    "guard.monitor_every=0",
    "validation.eval_draws=0",
    "validation.prompts=[]",
)
_SIZE = {"num_attention_heads": 6, "attention_head_dim": 64, "time_embed_dim": 64}
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Times:
    """Seconds of one run, by the clock and of its process."""

    until_first_step: tuple[float, float]
    """Until its first step was taken."""
    step: float
    """Of its process for a step after the first, of those in between the mean."""
    overlap: float
    """CPU seconds for the base's eval loss and samples, where they follow the first step."""
    after: tuple[float, float]
    """After its last step, to its end."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, num_rounds=2)
    parser.add_argument("--before", type=Path, help="Another checkout, to run beside this one.")
    parser.add_argument("--steps", type=int, default=5, help="of each run")
    arguments = parser.parse_args(argv)
    run_in_work_folder(run, arguments)


def make_parser(description: str | None, num_rounds: int) -> argparse.ArgumentParser:
    """A parser with the options of the work folder, the rounds, the model and the clips."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, help="Kept; by default a temporary folder.")
    parser.add_argument("--rounds", type=int, default=num_rounds)
    parser.add_argument("--layers", type=int, default=12, help="of the transformer")
    parser.add_argument("--size", type=int, nargs=2, default=(128, 192), help="height and width of clips")
    return parser


def run_in_work_folder(
    run: Callable[[Path, Path, Path, argparse.Namespace], None], arguments: argparse.Namespace
) -> None:
    """Call `run` with the work folder, the model and the clips in it, and the arguments."""
    with tempfile.TemporaryDirectory() as folder:
        work = arguments.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        model, clips = make_model(work / "model", arguments.layers), make_clips(work / "clips", *arguments.size)
        run(work, model, clips, arguments)


def run(work: Path, model: Path, clips: Path, arguments: argparse.Namespace) -> None:
    before, steps = arguments.before, arguments.steps
    common = build_size_options(arguments)
    trees = {"ours": ROOT, **({"before": before.absolute()} if before else {})}
    for name, tree in trees.items():  # encodes, and brings what is read into memory
        ours(tree, work, name, model, clips, (*common, "train.steps=1", *UNCHECKED))
    times: dict[str, list[Times]] = {}
    for _ in range(arguments.rounds):
        times.setdefault("bare", []).append(bare(work, model, clips, steps))
        for name, tree in trees.items():
            for path in (work / f"cache_{name}").glob("*.json"):
                path.unlink()
            for start_kind, options in (("first", ()), ("again", ()), ("unchecked", UNCHECKED)):
                run_times = ours(tree, work, name, model, clips, (*common, f"train.steps={steps}", *options))
                times.setdefault(f"{name}, {start_kind}", []).append(run_times)
    print(table(times, steps))


def table(times: Mapping[str, Sequence[Times]], steps: int) -> str:
    """Rows of medians, and how far each is from the target."""
    bare = statistics.median(t.until_first_step[1] for t in times["bare"])
    step = statistics.median(t.step for t in times["bare"])
    lines = [
        "| run | first step, s | CPU s | CPU over bare | within 1.3 x bare + 3 steps | a step, CPU s "
        "| beside, CPU s | after the last, s "
        "| CPU s | in all, CPU s |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for name, run_times in times.items():
        values = [
            statistics.median(column)
            for column in zip(*((*t.until_first_step, t.step, t.overlap, *t.after) for t in run_times), strict=True)
        ]
        first_step, cpu, own_step, overlapping, after, cpu_after = values
        target = 1.3 * bare + 3 * step
        is_met_text = f"{'yes' if cpu <= target else 'no'} ({target:.1f} s)" if name != "bare" else ""
        cells = (
            name, f"{first_step:.1f}", f"{cpu:.1f}", f"{cpu / bare:.2f}", is_met_text, f"{own_step:.2f}",
            f"{overlapping:.1f}", f"{after:.1f}", f"{cpu_after:.1f}",
            f"{cpu + (steps - 1) * own_step + overlapping + cpu_after:.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bare(work: Path, model: Path, clips: Path, steps: int) -> Times:
    folder = work / "run_bare"
    return timed(build_bare_command(folder, model, clips, steps), ROOT, folder)


def build_bare_command(folder: Path, model: Path, clips: Path, steps: int) -> list[str]:
    """Arguments of `benchmarks.bare_start` in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    return ["-m", "benchmarks.bare_start", str(model), str(clips), str(folder), str(steps)]


def build_size_options(arguments: argparse.Namespace) -> tuple[str, str]:
    height, width = arguments.size
    return f"data.height={height}", f"data.width={width}"


def ours(tree: Path, work: Path, name: str, model: Path, clips: Path, options: Sequence[str]) -> Times:
    folder = work / f"run_{name}"
    return timed(build_command(tree, work, name, model, clips, options), tree, folder)


def build_command(
    tree: Path, work: Path, name: str, model: Path, clips: Path, options: Sequence[str]
) -> tuple[str, ...]:
    """Arguments of a run of our recipe, in a new folder."""
    folder = work / f"run_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    values = (
        f"model.path={model}",
        f"data.path={clips}",
        f"data.cache={work / f'cache_{name}'}",
        "lora.rank=16",
        "lora.alpha=16",
        f"run.dir={folder}",
    )
    recipe = str(tree / "recipes" / "smoke" / "cogvideox.yaml")
    return (str(tree / "recipes" / "lora.py"), recipe, *values, *options)


def timed(arguments: Sequence[str], tree: Path, run_dir: Path) -> Times:
    """Run it to its end, and look at the clocks whenever it writes a step."""
    step_clocks, (wall, cpu) = watch_process(arguments, tree, run_dir)
    after = wall - step_clocks[-1][0], cpu - step_clocks[-1][1]
    overlapping = _overlap_seconds(run_dir)
    step = (step_clocks[-1][1] - step_clocks[0][1] - overlapping) / max(1, len(step_clocks) - 1)
    return Times(step_clocks[0], step, overlapping, after)


def watch_process(
    arguments: Sequence[str], tree: Path, run_dir: Path
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Run a Python script to its end. Returns (wall, CPU) seconds at each line of metrics.jsonl and at the end."""
    path = os.pathsep.join(filter(None, [str(tree), str(tree / "kernels"), os.environ.get("PYTHONPATH", "")]))
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=(run_dir.parent / f"{run_dir.name}.log").open("w"),
    )
    step_clocks: list[tuple[float, float]] = []
    clocks = (0.0, 0.0)
    while process.poll() is None:
        time.sleep(0.02)
        clocks = time.perf_counter() - began, _cpu_seconds(process.pid) or clocks[1]
        step_clocks += [clocks] * (_steps(run_dir) - len(step_clocks))
    if process.returncode != 0:
        raise SystemExit(f"{arguments[0]} ended with {process.returncode}: see {run_dir}.log")
    return step_clocks, (time.perf_counter() - began, clocks[1])


def _overlap_seconds(run_dir: Path) -> float:
    """CPU seconds of eval losses and samples between a run's first step and its last line of metrics."""
    try:
        phases = json.loads((run_dir / "phases.json").read_text())["phases"]
    except OSError:
        return 0.0
    # Saving and the last comparison come after that line.
    between = {"eval loss", "samples"}
    return sum(p["cpu_seconds"] for p in phases if p["stage"] == "training" and p["name"] in between)


def _steps(run_dir: Path) -> int:
    """Count the steps that a run has written."""
    try:
        return (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def make_model(folder: Path, layers: int) -> Path:
    """Write the tiny CogVideoX-5B with a transformer of so many blocks of width 384."""
    if not folder.exists():
        # Late: this process only waits, and imports would take from what it measures.
        import torch
        from diffusers import CogVideoXTransformer3DModel

        from dit_lora.families import get_family
        from dit_lora.files import write_folder_atomically

        with write_folder_atomically(folder) as staged:
            get_family("cogvideox").build_tiny_checkpoint("cogvideox-5b", staged, 0)
            torch.manual_seed(0)
            config = CogVideoXTransformer3DModel.load_config(staged / "transformer")
            kind: Any = CogVideoXTransformer3DModel
            kind.from_config({**config, **_SIZE, "num_layers": layers}).save_pretrained(staged / "transformer")
    return folder


def make_clips(folder: Path, height: int, width: int) -> Path:
    if not folder.exists():
        from dit_lora.data.synthetic.clips import write_shapes
        from dit_lora.files import write_folder_atomically

        with write_folder_atomically(folder) as staged:
            write_shapes(staged, clips=6, frames=17, height=height, width=width, fps=8.0)
    return folder


if __name__ == "__main__":
    main()
