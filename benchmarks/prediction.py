"""Compares `dit-lora plan`'s seconds a step with real ones, on this machine's CPU or GPU.

    python -m benchmarks.prediction [--recipes NAME ...] [--steps N] [--within FACTOR]

Measures what the device reaches, then runs smoke recipes on tiny models, each predicted as a run predicts itself. A
time, so no test: exit code 1 if a median step took more than FACTOR times its prediction, or less than a FACTOR-th.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState

from benchmarks.forks import ROOT, load_script
from benchmarks.machine import facts, in_words
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.environment.ceilings import Ceilings
from dit_lora.families import get_family
from dit_lora.parsing import parse_json
from dit_lora.planning import speed
from dit_lora.planning.measure import measure_ceilings

_FAMILIES = {
    "cogvideox": ("cogvideox", "cogvideox-5b"),
    "sana": ("sana", "sana-600m"),
    "latte": ("latte", "latte"),
}
"""Family and tiny checkpoint, by smoke recipe."""
_FIRST = 3
"""Steps that are left out: they allocate and settle."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=list(_FAMILIES), choices=list(_FAMILIES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--within", type=float, default=3.0)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceilings = measure_ceilings(device)
    rows, far = [], 0
    for name in args.recipes:
        with tempfile.TemporaryDirectory() as folder:
            predicted, real = _run(name, Path(folder), ceilings, args.steps)
        far += not 1 / args.within <= real / predicted <= args.within
        rows.append(f"| {name} | {predicted:.4f} | {real:.4f} | {real / predicted:.2f} |")
    command = ["python", "-m", "benchmarks.prediction", *(argv or sys.argv[1:])]
    print(in_words(facts(device, command)))
    print("\n| recipe | predicted, s | median step, s | step / predicted |\n|---|---:|---:|---:|")
    print("\n".join(rows))
    return 1 if far else 0


def _run(name: str, folder: Path, ceilings: Ceilings, steps: int) -> tuple[float, float]:
    """Return the prediction that a run kept, and its median step without waiting for data."""
    family, variant = _FAMILIES[name]
    get_family(family).build_tiny(variant, folder / "model", 0)
    write_shapes(folder / "clips", clips=6, frames=9, height=64, width=96, fps=8)
    values = [
        f"model.path={folder / 'model'}",
        f"data.path={folder / 'clips'}",
        f"run.dir={folder / 'run'}",
        f"train.steps={steps + _FIRST}",
        "validation.prompts=[]",
        "guard.monitor_every=0",
    ]
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.object(speed, "load_ceilings", return_value=ceilings):
        load_script().main([str(ROOT / "recipes" / "smoke" / f"{name}.yaml"), *values])
    prediction: dict[str, Any] = parse_json((folder / "run" / "prediction.json").read_text())
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()[_FIRST:]
    records = [parse_json(line) for line in lines]
    taken = [one["seconds"] - one["data_seconds"] for one in records if "seconds" in one]
    return float(prediction["seconds"]), statistics.median(taken)


if __name__ == "__main__":
    sys.exit(main())
