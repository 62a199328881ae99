"""Check gradients of tiny models in which faults are planted: each must be found.

    python -m benchmarks.gradient_check [--families wan sana] [--dtypes fp32] [--steps 0 3] [--only detached]
        [--rounding] [--work FOLDER] [--results FILE.jsonl] [--minutes 3]

A long run can be made in parts: rows in FILE are not computed again, and `--minutes` ends a part. Checks of right
gradients are in `benchmarks.gradient_check.healthy`.

All values of a step with a planted fault are finite, and its loss is right. For each fault it prints: how far the
gradient is off (relative to the right one), the result, the direction that found it, slope / gradient with its bound,
the layer named and whether that layer's gradient is indeed wrong, and the evaluations of the loss.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from benchmarks.gradient_check.faults import FAULTS, GradientFault
from benchmarks.gradient_check.rounding import measure_largest_rounding
from benchmarks.gradient_check.stored_rows import StoredRows
from benchmarks.gradient_check.tiny_training import TinyTraining
from dit_lora.guard.gradient_check.check import GradientReport, get_module_name
from dit_lora.guard.gradient_check.low_precision import check_step_gradient
from dit_lora.guard.replay import preserve_gradients
from dit_lora.numerics.precision import DTYPES

FAMILIES = ("cogvideox", "wan", "flux", "sana", "sd3", "qwen_image")
_MIN_ERRORS = {torch.float32: 1e-3, torch.bfloat16: 0.01}
"""A layer's gradient is wrong from this relative error on, above the rounding of a second backward pass."""
_OUTCOMES = ("found", "within the bound", "missed", "cannot tell")
_HEADER = (
    "| fault | family | dtype | step | error | result | direction | slope / gradient | bound | layer | evaluations |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)

Gradients = Mapping[str, torch.Tensor]


def check_step(training: TinyTraining) -> GradientReport:
    return check_step_gradient(training.make_replayable())


def measure_errors(gradients: Gradients, right: Gradients) -> dict[str, float]:
    """Relative errors of the gradients by layer; over all layers as `""`."""
    squares: dict[str, list[float]] = {}
    for name, gradient in right.items():
        for layer in ("", get_module_name(name)):
            sums = squares.setdefault(layer, [0.0, 0.0])
            sums[0] += (gradients[name] - gradient).double().square().sum().item()
            sums[1] += gradient.double().square().sum().item()
    return {layer: (error / (total or 1.0)) ** 0.5 for layer, (error, total) in squares.items()}


def compute_gradients_in_fp32(training: TinyTraining) -> Gradients:
    """Gradients of a replay of the step in fp32, as a check of a step in bf16 makes it."""
    step = replace(training.make_replayable(), is_in_fp32=True)
    with step.use_replay_precision(), preserve_gradients(training.model):
        step.compute_gradients()
        return training.copy_gradients()


def name_outcome(report: GradientReport, gradients: Gradients, right: Gradients) -> str:
    """The result for a planted fault; a fault that the gradient's own bound admits is not missed.

    The gradients are those that the check has compared with slopes: of a step in bf16, its replays in fp32.
    """
    if report.result != "agrees" or report.worst is None:
        return "found" if report.result == "differs" else "cannot tell"
    slope = sum((gradients[name].double() * right[name].double()).sum().item() for name in right)
    ratio = slope / sum(gradient.double().square().sum().item() for gradient in gradients.values())
    return "within the bound" if abs(ratio - 1) <= report.worst.bound else "missed"


def judge_fault(fault: GradientFault, training: TinyTraining, family: str) -> str | None:
    """A row of the table; None if the fault changes no gradient."""
    training.run_backward()
    right = training.copy_gradients()
    fault.plant(training)
    faulty = training.copy_gradients()
    errors = measure_errors(faulty, right)
    if errors[""] < 1e-6:
        return None
    dtype = training.dtype
    with fault.replay(training):
        report = check_step(training)
        # A bf16 step's rounding is larger than some faults.
        if report.is_in_fp32 and fault.is_in_replays:
            dtype, faulty = torch.float32, compute_gradients_in_fp32(training)
    if dtype != training.dtype:
        right = compute_gradients_in_fp32(training)
        errors = measure_errors(faulty, right)
    worst, location = report.worst, report.location
    layer = ""
    if location is not None:
        layers = [location.layer] if location.layer else location.candidates
        is_right = any(errors[name] > _MIN_ERRORS[dtype] for name in layers)
        layer = f"{location.layer or f'{len(layers)} layers'} ({'right' if is_right else 'wrong'})"
    found_by = (worst.direction, f"{worst.ratio:.4f}", f"{worst.bound:.2g}") if worst else ("replays", "", "")
    cells = (
        *(fault.name, family, _get_dtype_name(training.dtype), training.step, f"{errors['']:.2g}"),
        *(name_outcome(report, faulty, right), *found_by, layer, report.num_evaluations),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _get_dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, value in DTYPES.items() if value == dtype)


def run_faults(arguments: argparse.Namespace, stored: StoredRows, family: str, dtype: torch.dtype) -> Iterator[str]:
    """Plant each fault at each of the steps."""
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    for dropout in sorted({fault.dropout for fault in faults}):
        training = None
        for step, fault in product(sorted(arguments.steps), faults):
            if fault.dropout != dropout:
                continue
            key = (family, _get_dtype_name(dtype), step, fault.name)
            if not stored.has(*key):
                if stored.is_time_over:
                    return
                training = training or TinyTraining.from_family(family, arguments.work, dtype, dropout=dropout)
                training.train(step - training.step)
                stored.add(key, {"row": judge_fault(fault, training, family)})
            row = stored.get(*key)["row"]
            if row is not None:
                yield row


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=("fp32", "bf16"))
    parser.add_argument("--steps", nargs="+", type=int, default=(0, 3), help="steps trained before the planted fault")
    parser.add_argument("--only", default="", metavar="WORDS", help="faults with these words in their name")
    parser.add_argument("--rounding", action="store_true", help="measure rounding errors of right gradients only")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keeps rows for the next call")
    parser.add_argument("--minutes", type=float, metavar="N", help="stop after so many minutes")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keeps tiny checkpoints for the next call")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    rows: list[str] = []
    stored = StoredRows(arguments.results, arguments.minutes)
    with tempfile.TemporaryDirectory() as temporary:
        arguments.work = arguments.work or Path(temporary)
        arguments.work.mkdir(exist_ok=True)
        runs = [(family, DTYPES[name]) for family in arguments.families for name in arguments.dtypes]
        if arguments.rounding:
            for family, dtype in runs:
                rounding = measure_largest_rounding(family, arguments.work, dtype)
                print(f"{family} {_get_dtype_name(dtype)}: {rounding}", flush=True)
            return 0
        print(_HEADER)
        for family, dtype in runs:
            for row in run_faults(arguments, stored, family, dtype):
                print(row, flush=True)
                rows.append(row)
    if stored.is_time_over:
        print("time is over: the same command goes on from here")
    counts = [f"{sum(f'| {outcome} |' in row for row in rows)} {outcome}" for outcome in _OUTCOMES]
    num_wrong = sum("(wrong)" in row for row in rows)
    print(f"{len(rows)} faults: {', '.join(counts)}; {num_wrong} with a wrong layer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
