"""Whole time of a run with all its checks, over that of the script that Diffusers publishes.

    python -m benchmarks.race [--script train_cogvideox_lora.py] [--work FOLDER] [--rounds 3] [--steps 12 200]
                              [--caches cold warm] [--layers 12] [--size HEIGHT WIDTH]

The model, clips and recipe are those of `benchmarks.first_step`. `script` is a copy of the file given by `--script`,
with `benchmarks/stand_ins` where torchvision or decord is not installed; without the option, `benchmarks.bare_start`.
`cold` finds no cache, `warm` the cache of the run before; `--caches warm` takes that of an earlier race in FOLDER.
The runs of a round follow each other; medians are taken over rounds. The ratio is of CPU time, which a busy machine
does not change. The last column is the time outside of steps by phase.
"""

import argparse
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.first_step import (
    ROOT,
    build_bare_command,
    build_command,
    build_size_options,
    make_parser,
    run_in_work_folder,
    watch_process,
)
from benchmarks.world.diffusers_script import add_stand_ins

LIMITS = {"cold": 1.5, "warm": 1.25}
"""Highest ratio that a run of `SHORT` steps should have."""
SHORT = 12
LONG_LIMIT = 1.05
"""Highest ratio that a longer run should have, with a warm cache."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, num_rounds=3)
    parser.add_argument("--script", type=Path, help="Diffusers' train_cogvideox_lora.py.")
    parser.add_argument("--steps", type=int, nargs="+", default=[SHORT], help="of each run; several: one race each")
    parser.add_argument("--caches", choices=LIMITS, nargs="+", default=list(LIMITS), help="kinds of runs")
    run_in_work_folder(run, parser.parse_args(argv))


def run(work: Path, model: Path, clips: Path, arguments: argparse.Namespace) -> None:
    print("| steps | run | whole, s | CPU s | CPU over the script's | limit | outside of steps, CPU s |")
    print("|---:|---|---:|---:|---:|---:|---|")
    for steps in arguments.steps:
        times: dict[str, list[tuple[float, float]]] = {}
        phases = dict[str, str]()
        for _ in range(arguments.rounds):
            times.setdefault("script", []).append(race_script(work, model, clips, steps, arguments))
            if "cold" in arguments.caches:
                shutil.rmtree(work / "cache_race", ignore_errors=True)
            for name in arguments.caches:
                times.setdefault(name, []).append(race_recipe(work, model, clips, steps, arguments))
                phases[name] = describe_phases(work / "run_race")
        wall, cpu = map(statistics.median, zip(*times["script"], strict=True))
        print(f"| {steps} | script | {wall:.1f} | {cpu:.1f} | 1.00 | | |")
        for name in arguments.caches:
            print_row(name, steps, times, phases[name])


def print_row(name: str, steps: int, times: dict[str, list[tuple[float, float]]], phases: str) -> None:
    """Print the medians of one kind of run."""
    script_cpu = statistics.median(cpu for _, cpu in times["script"])
    wall, cpu = (statistics.median(column) for column in zip(*times[name], strict=True))
    limit = LIMITS[name] if steps <= SHORT else LONG_LIMIT
    print(f"| {steps} | {name} | {wall:.1f} | {cpu:.1f} | {cpu / script_cpu:.2f} | {limit} | {phases} |", flush=True)


def race_script(
    work: Path, model: Path, clips: Path, steps: int, arguments: argparse.Namespace
) -> tuple[float, float]:
    """Wall and CPU seconds of Diffusers' script with the settings of our recipe."""
    folder = work / "run_script"
    command = build_bare_command(folder, model, clips, steps)
    if arguments.script is not None:
        lines = [json.loads(line) for line in (clips / "metadata.jsonl").read_text().splitlines()]
        (clips / "prompts.list").write_text("".join(f"{line['text']}\n" for line in lines))
        (clips / "videos.list").write_text("".join(f"{line['file_name']}\n" for line in lines))
        height, width = map(str, arguments.size)
        copy = work / "train_cogvideox_lora.py"
        copy.write_text(add_stand_ins(arguments.script.read_text(encoding="utf-8")), encoding="utf-8")
        command = [
            str(copy.absolute()), "--pretrained_model_name_or_path", str(model), "--output_dir",
            str(folder), "--instance_data_root", str(clips), "--caption_column", "prompts.list", "--video_column",
            "videos.list", "--height", height, "--width", width, "--max_num_frames", "9", "--train_batch_size", "2",
            "--max_train_steps", str(steps), "--rank", "16", "--lora_alpha", "16", "--learning_rate", "1e-3",
            "--lr_scheduler", "constant", "--optimizer", "adamw", "--mixed_precision", "no", "--seed", "42",
        ]  # fmt: skip
    return watch_process(command, ROOT, folder)[1]


def race_recipe(
    work: Path, model: Path, clips: Path, steps: int, arguments: argparse.Namespace
) -> tuple[float, float]:
    """Wall and CPU seconds of our recipe as it comes, all checks on."""
    options = (*build_size_options(arguments), f"train.steps={steps}")
    command = build_command(ROOT, work, "race", model, clips, options)
    return watch_process(command, ROOT, work / "run_race")[1]


def describe_phases(run_dir: Path) -> str:
    """CPU seconds of each phase of a run, by stage, without those below a tenth of a second."""
    phases = json.loads((run_dir / "phases.json").read_text())["phases"]
    texts = []
    for stage in ("before", "training", "after"):
        stage_phases = [p for p in phases if p["stage"] == stage and "/" not in p["name"] and p["cpu_seconds"] >= 0.1]
        texts.append(f"{stage}: " + ", ".join(f"{p['name']} {p['cpu_seconds']:.1f}" for p in stage_phases))
    return "; ".join(texts)


if __name__ == "__main__":
    main()
