"""Whole LoRA training steps with our kernels and without, on random weights at real sizes.

    python -m benchmarks.step [--models NAME ...] [--settings NAME ...] [--steps N] [--out FOLDER]
                              [--device cuda|cpu] [--budget S]

Settings, one after the other on the same model, adapters, batches and seeds:
example            Diffusers' LoRA scripts: bf16 base, fp32 adapters, bf16 autocast, gradient checkpointing, AdamW
stock, none        the same without gradient checkpointing
compiled           either of them with each block through torch.compile
ours               dit_lora.fuse, checkpointing by our advisor (or as named), fused AdamW
ours, guard        ours within the loop of a run: gate, norms by group, the step's one read, the record for replays
ours, cuDNN off    ours without cuDNN's attention, which PyTorch prefers on some GPUs
ours, deterministic  ours with only PyTorch's deterministic algorithms, as train.deterministic
ours, fp8          ours with frozen products in fp8, where kernels.fp8 exists and the GPU has them
If the deterministic one is included, all settings run with the cuBLAS workspace that it needs: cuBLAS reads it once a
process. The losses of all settings at each step must be nearly equal, except fp8's. A setting that does not fit into
memory is reported as such. Every result is written at once: a line of JSON with its kernels and the GPU's clocks, and
the table. `--models tiny` runs on a CPU, with the kernels' references.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_state import gpu_state
from benchmarks.kernel_time import kernel_times
from benchmarks.machine import ROOT, facts, file_stem
from benchmarks.step_models import MODELS, TINY, Draws, Inputs, Model
from benchmarks.step_settings import SETTINGS, TARGET, Setting, Steps, ops_used, settled
from benchmarks.step_table import WARM_UP, Result, markdown
from dit_lora.errors import DitLoraError
from dit_lora.training.session.determinism import configure_cublas_workspace

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, DitLoraError)
_COMPILING = 60.0
"""Seconds that inductor may take before the first step of a compiled setting: assumed."""


class _TimeUpError(Exception):
    """No step begins after the budget's end."""


@dataclass(frozen=True)
class Timing:
    """The device, steps and end of a run of the benchmark."""

    device: torch.device
    steps: int
    ends: float

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def lacks(self, setting: Setting) -> bool:
        """True if there is not enough time left for this setting."""
        compiling = _COMPILING if setting.compiled and self.device.type == "cuda" else 0.0
        return time.monotonic() + compiling > self.ends


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    chosen, settings = _chosen(args.models), _settings(args.settings)
    if chosen is None or settings is None:
        return 2
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("step: there is no CUDA device here; --models tiny --device cpu runs\n")
        return 2
    settings = [candidate for candidate in settings if not candidate.fp8 or _has_fp8(device)]
    if any(candidate.deterministic for candidate in settings):
        configure_cublas_workspace()
    timing = Timing(device, args.steps, time.monotonic() + args.budget)
    machine_facts = facts(device, ["python", "-m", "benchmarks.step", *(argv or sys.argv[1:])])
    results = [Result(name, setting.name) for name in chosen for setting in settings]
    path = args.out / file_stem("step", machine_facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    _append(path, {"about": machine_facts}, anew=True)
    text = markdown(machine_facts, results, chosen, args.steps)
    for name, entry in chosen.items():
        model_results = [result for result in results if result.model == name]
        for result in _run_model(entry, settings, model_results, timing):
            _append(path, result.record())
            text = markdown(machine_facts, results, chosen, args.steps)
            path.with_suffix(".md").write_text(text)
    print(text, end="")
    failures = [f"{r.model}, {r.setting}: {r.failed}" for r in results if r.failed]
    for line in failures:
        sys.stderr.write(f"failed: {line}\n")
    return 1 if failures else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--settings", nargs="+", default=names, metavar="NAME")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="timed, after a warm-up")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="S", help="no step begins after it")
    return parser.parse_args(argv)


def _chosen(names: Sequence[str]) -> dict[str, Model] | None:
    models = {**MODELS, **TINY}
    if unknown := [name for name in names if name not in (*models, "tiny")]:
        sys.stderr.write(f"step: no model is called {', '.join(unknown)}; there are {', '.join((*models, 'tiny'))}\n")
        return None
    names_asked = [expanded for name in names for expanded in (TINY if name == "tiny" else (name,))]
    return {name: models[name] for name in names_asked}


def _settings(names: Sequence[str]) -> list[Setting] | None:
    """The settings with these names in their defined order, plus the example, which all are compared with.

    None if a name is unknown.
    """
    all_names = [setting.name for setting in SETTINGS]
    if unknown := [name for name in names if name not in all_names]:
        sys.stderr.write(f"step: no setting is called {'; '.join(unknown)}; there are {'; '.join(all_names)}\n")
        return None
    return [setting for setting in SETTINGS if setting.name in (all_names[0], *names)]


def _has_fp8(device: torch.device) -> bool:
    """True if PyTorch's fp8 matrix products run on this device (Ada, Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _append(path: Path, line: Mapping[str, Any], *, anew: bool = False) -> None:
    with path.with_suffix(".jsonl").open("w" if anew else "a") as file:
        file.write(json.dumps(line) + "\n")


def _run_model(
    entry: Model, settings: Sequence[Setting], results: Sequence[Result], timing: Timing
) -> Iterator[Result]:
    """Run every setting in turn on one model, with equal adapters at the start; yield each result when it ends."""
    if time.monotonic() > timing.ends:
        return
    try:
        model = entry.build(timing.device)
    except FAILURES as error:
        results[0].failed = _first_line(error)
        yield results[0]
        return
    batches = [build_batch(model, entry, number, timing.device) for number in range(WARM_UP + timing.steps + 1)]
    for setting, result in zip(settings, results, strict=True):
        result.same_as = _done_before(setting, results)
        if result.same_as is None and not timing.lacks(setting):
            sys.stderr.write(f"{result.model}: {setting.name}\n")
            _run_setting(model, entry, setting, result, batches, timing)
        yield result


def build_batch(model: Any, entry: Model, number: int, device: torch.device) -> Inputs:
    """Inputs of one step, and the noise that the output is compared with."""
    inputs = entry.inputs(Draws(number, device))
    size = list(inputs["hidden_states"].shape)
    # Of class-conditional DiT the output has the variance too.
    size[entry.channels_at] = model.config.out_channels
    generator = torch.Generator(device).manual_seed(10_000 + number)
    return inputs | {TARGET: torch.randn(size, generator=generator, device=device)}


def _done_before(setting: Setting, results: Sequence[Result]) -> str | None:
    """Name of the setting that already measured the same steps: `ours`, if the advisor chose this checkpointing.

    Else None.
    """
    fused_setting = Setting(setting.name, setting.checkpointing, fused=True)
    earlier = [r for r in results if r.setting == "ours" and r.mode == setting.checkpointing]
    return "ours" if setting == fused_setting and earlier else None


def _run_setting(
    model: Any,
    entry: Model,
    setting: Setting,
    result: Result,
    batches: Sequence[Inputs],
    timing: Timing,
) -> None:
    """Take a setting's steps; what fails, or does not fit, says so in the result."""
    try:
        with settled(model, entry, setting, batches, timing.wait) as steps:
            result.mode, result.words = steps.mode, steps.reason
            result.read_late = setting.guarded
            _measure(steps, result, timing)
            result.ops = ops_used(model)
    except _TimeUpError:
        pass
    except torch.OutOfMemoryError:
        result.fits, result.seconds = False, []
    except FAILURES as error:
        result.failed = _first_line(error)
    gc.collect()
    if timing.device.type == "cuda":
        torch.cuda.empty_cache()


def _measure(steps: Steps, result: Result, timing: Timing) -> None:
    """Warm up, time as many steps as there is time for, and look at the kernels of one more."""
    began = time.perf_counter()

    def warm(_number: int, loss: float, _host: float | None) -> None:
        result.losses.append(loss)
        result.warm_up = time.perf_counter() - began
        _require_time(timing)

    steps.take(0, WARM_UP - 1, warm)
    if timing.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(timing.device)
    began = time.perf_counter()

    def timed(_number: int, loss: float, host: float | None) -> None:
        # No waiting here: the device has done a plain step, and the loop may have launched the next one.
        nonlocal began
        result.seconds.append(time.perf_counter() - began)
        result.losses.append(loss)
        result.host += [host] if host is not None else []
        if timing.device.type == "cuda":
            result.peak = torch.cuda.max_memory_allocated(timing.device)
        _require_time(timing)
        began = time.perf_counter()

    last_step = WARM_UP + timing.steps - 1
    steps.take(WARM_UP, last_step, timed)
    if timing.device.type == "cuda":
        result.gpu = gpu_state(timing.device.index or 0)
    result.kernels = kernel_times(timing.device, lambda: steps.take(last_step + 1, last_step + 1, lambda *_: None))


def _require_time(timing: Timing) -> None:
    if time.monotonic() > timing.ends:
        raise _TimeUpError


def _first_line(error: Exception) -> str:
    line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {line[:160]}"


if __name__ == "__main__":
    sys.exit(main())
