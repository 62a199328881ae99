"""Ways to teach a guidance-distilled base a new shape, judged at guidance 1, several seeds each.

    python -m benchmarks.world.distilled WORK [--routes guided plain] [--seeds 0 1 2] [--steps 600] [--per-group 24]

First the demo's base is distilled to WORK/distilled, once (`benchmarks.world.distillation`), and the de-distillation
adapter is trained on it, once. Each run then adds one line to WORK/results.jsonl. A run that has its line is not
repeated, so that the whole can be stopped and continued. At the end the table of all lines is printed.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.world.distillation import distil_guidance
from benchmarks.world.quality import GUIDANCE
from benchmarks.world.settings import (
    BASE,
    KNOWN_CLIPS,
    NEW_CLIPS,
    format_spread,
    has_record,
    judge,
    read_records,
    train,
    write_clips,
    write_records,
)

DISTILLED, DE_DISTILLATION = "distilled", "de_distillation"
"""Names in WORK: of the distilled base, and of the run that takes the distillation back."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """A base, a way to train a LoRA on it, and the guidance of its samples."""

    label: str
    is_distilled: bool = True
    """On the distilled base; otherwise on the demo's."""
    guidance: float = 1.0
    overrides: tuple[str, ...] | None = ()
    """Changes of the recipe `demo/moon`; None for no LoRA."""
    has_adapter_under: bool = False
    """With the frozen de-distillation adapter in training, without it in samples."""


ROUTES = {
    "base_guided": Route(
        label=f"no LoRA: base, guidance {GUIDANCE:g}", is_distilled=False, guidance=GUIDANCE, overrides=None
    ),
    "base": Route(label="no LoRA: base, guidance 1", is_distilled=False, overrides=None),
    "distilled": Route(label="no LoRA: distilled base, guidance 1", overrides=None),
    "own": Route(
        label=f"base's own route: LoRA on the base, guidance {GUIDANCE:g}", is_distilled=False, guidance=GUIDANCE
    ),
    "plain": Route(label="plain loss on the distilled base"),
    "under": Route(label="de-distillation adapter under the LoRA", has_adapter_under=True),
    "guided": Route(label="guided target", overrides=("train.target=guided", f"train.guided_scale={GUIDANCE}")),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--routes", nargs="+", choices=list(ROUTES), default=list(ROUTES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600, help="of each LoRA, and of the de-distillation adapter")
    parser.add_argument(
        "--per-group", type=int, default=24, help="judged samples of the new shape, and as many others"
    )
    parser.add_argument("--distillation-steps", type=int, default=600)
    parser.add_argument("--distillation-clips", type=int, default=600)
    parser.add_argument("--new-clips", type=int, default=NEW_CLIPS, help="clips of the new shape")
    parser.add_argument("--known-clips", type=int, default=KNOWN_CLIPS, help="clips of shapes that the base knows")
    args = parser.parse_args(arguments)
    args.work.mkdir(parents=True, exist_ok=True)
    distilled = args.work / DISTILLED
    if not distilled.exists():
        began = time.perf_counter()
        loss = distil_guidance(
            BASE, distilled, guidance=GUIDANCE, steps=args.distillation_steps, num_clips=args.distillation_clips
        )
        print(f"distillation: loss {loss:.2g}, {time.perf_counter() - began:.0f} s")
    results = args.work / "results.jsonl"
    records = read_records(results)
    for seed in args.seeds:
        for name in args.routes:
            if not has_record(records, name, seed):
                records.append({"setting": name, "seed": seed} | run_route(args, ROUTES[name], name, seed))
                write_records(results, records)
    print_table(records)


def run_route(args: argparse.Namespace, route: Route, name: str, seed: int) -> dict[str, float]:
    """Train a route's LoRA if it has any, and judge it.

    Returns the shares `new` and `others`; with a LoRA also `seconds`, `peak_gib`, and `loss`, which is the mean of the
    last sixth of the steps.
    """
    base = args.work / DISTILLED if route.is_distilled else BASE
    run_dir, costs = None, {}
    if route.overrides is not None:
        clips = write_clips(args.work, seed, args.new_clips, args.known_clips)
        overrides = [*route.overrides, f"train.seed={seed}", f"train.steps={args.steps}"]
        if route.has_adapter_under:
            overrides.append(f"lora.under=[{train_de_distillation(args)}]")
        run_dir = args.work / f"{name}_{seed}"
        shutil.rmtree(run_dir, ignore_errors=True)
        costs = train(run_dir, clips, overrides, base) | {"loss": read_final_loss(run_dir)}
    return costs | judge(run_dir, args.per_group, seed, base=base, guidance=route.guidance)


def train_de_distillation(args: argparse.Namespace) -> Path:
    """Train the de-distillation adapter: the demo's LoRA, with the plain loss, on clips that the base knows.

    Returns its run's folder. A run that has ended is not repeated.
    """
    run_dir: Path = args.work / DE_DISTILLATION
    if not (run_dir / "adapter").exists():
        shutil.rmtree(run_dir, ignore_errors=True)
        known_clips = write_clips(args.work, 0, args.new_clips, args.known_clips)[1]
        sources = json.dumps([{"path": str(known_clips)}])
        overrides = [f"data.sources={sources}", "train.seed=1000", f"train.steps={args.steps}"]
        train(run_dir, (known_clips, known_clips), overrides, args.work / DISTILLED)
    return run_dir


def read_final_loss(run_dir: Path) -> float:
    """Mean training loss of a run's last sixth of steps."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    return statistics.mean(losses[-max(1, len(losses) // 6) :])


def print_table(records: Sequence[dict[str, Any]]) -> None:
    """Print a row for each route that has records: shares in percent, medians of seconds and loss."""
    print("| route | seeds | new shape, % | others, % | seconds | loss |")
    print("|---|---|---|---|---|---|")
    for name, route in ROUTES.items():
        group = [record for record in records if record["setting"] == name]
        if not group:
            continue
        cells = [format_spread([100 * record[key] for record in group]) for key in ("new", "others")]
        for key, digits in (("seconds", 0), ("loss", 4)):
            values = [record[key] for record in group if key in record]
            cells.append(f"{statistics.median(values):.{digits}f}" if values else "")
        print(f"| {route.label} | {len(group)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
