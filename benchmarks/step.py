"""Whole LoRA training steps with our kernels and without, on random weights at real sizes.

    python -m benchmarks.step [--models NAME ...] [--steps N] [--out FOLDER] [--device cuda|cpu] [--budget S]

Settings, one after the other on the same model, adapters, batches and seeds:
example            Diffusers' LoRA scripts: bf16 base, fp32 adapters, bf16 autocast, gradient checkpointing, AdamW
compiled blocks    the same, each block through torch.compile
no checkpointing   the example without gradient checkpointing
ours               dit_lora.fuse, checkpointing by our advisor, fused AdamW
The losses of all settings at each step must lie on top of each other. What does not fit the memory says so.
`--models tiny` runs on a CPU, with the kernels' references, in place of a test.
"""

import argparse
import datetime
import gc
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from benchmarks.step_models import MODELS, TINY, Draws, Model
from dit_lora.errors import DitLoraError
from dit_lora.fuse.api import fuse, unfuse
from dit_lora.fuse.patches import fusion_of
from dit_lora.training.choose_checkpointing import bytes_to_come
from dit_lora.training.execution.activation_checkpointing import set_checkpointing
from dit_lora.training.execution.activations import SHARE, advise, measure

ROOT = Path(__file__).parents[1]
WARM_UP = 2
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, DitLoraError)


@dataclass(frozen=True)
class Setting:
    """One way to train."""

    name: str
    checkpointing: Literal["none", "full", "auto"] = "full"
    compiled: bool = False
    fused: bool = False


SETTINGS = (
    Setting("example"),
    Setting("compiled blocks", compiled=True),
    Setting("no checkpointing", checkpointing="none"),
    Setting("ours", checkpointing="auto", fused=True),
)


@dataclass
class Result:
    """What one setting of one model did."""

    model: str
    setting: str
    seconds: list[float] = field(default_factory=list)
    """Of each step after the warm-up."""
    warm_up: float = 0.0
    losses: list[float] = field(default_factory=list)
    peak: int | None = None
    words: str = ""
    failed: str | None = None
    fits: bool = True

    def difference(self, example: "Result") -> float | None:
        """The largest relative difference of a step's loss from that of the example."""
        pairs = list(zip(self.losses, example.losses, strict=False))
        return max((abs(a - b) / abs(b) for a, b in pairs), default=None)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    device = torch.device(args.device)
    chosen = _chosen(args.models)
    if chosen is None:
        return 2
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("step: there is no CUDA device here; --models tiny --device cpu runs\n")
        return 2
    ends, text = time.monotonic() + args.budget, ""
    results = [Result(name, setting.name) for name in chosen for setting in SETTINGS]
    for name, entry in chosen.items():
        own = [result for result in results if result.model == name]
        for _ in _run_model(entry, own, device, args.steps, ends):
            text = _markdown(results, chosen, device, args.steps)
            _write(args.out, device, text)
    print(text, end="")
    _draw(args.out, device, results)
    failures = [f"{r.model}, {r.setting}: {r.failed}" for r in results if r.failed]
    for line in failures:
        sys.stderr.write(f"failed: {line}\n")
    return 1 if failures else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="timed, after a warm-up")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="S", help="no step begins after it"
    )
    return parser.parse_args(argv)


def _chosen(names: Sequence[str]) -> dict[str, Model] | None:
    known = {**MODELS, **TINY}
    if unknown := [name for name in names if name not in (*known, "tiny")]:
        sys.stderr.write(
            f"step: no model is called {', '.join(unknown)}; there are {', '.join((*known, 'tiny'))}\n"
        )
        return None
    asked = [one for name in names for one in (TINY if name == "tiny" else (name,))]
    return {name: known[name] for name in asked}


def _run_model(
    entry: Model, results: Sequence[Result], device: torch.device, steps: int, ends: float
) -> Iterator[Result]:
    """Every setting in turn on one model, whose adapters start alike each time; each result when it is there."""
    if time.monotonic() > ends:
        yield results[0]
        return
    try:
        model = entry.build(device)
    except FAILURES as error:
        results[0].failed = _first_line(error)
        yield results[0]
        return
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for setting, result in zip(SETTINGS, results, strict=True):
        if time.monotonic() < ends:
            sys.stderr.write(f"{result.model}: {setting.name}\n")
            try:
                _run(model, entry, setting, result, steps, ends)
            except torch.OutOfMemoryError:
                result.fits, result.seconds = False, []
            except FAILURES as error:
                result.failed = _first_line(error)
            _reset(model, trained)
        yield result


def _first_line(error: Exception) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first[:160]}"


def _run(
    model: Any, entry: Model, setting: Setting, result: Result, steps: int, ends: float
) -> None:
    """Warm up, then time `steps` steps or as many as there is time for."""
    device = next(model.parameters()).device
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = {"fused": True} if setting.fused and device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, **fused)
    _prepare(model, entry, setting, optimizer, result)
    losses = []
    for number in range(WARM_UP + steps):
        if time.monotonic() > ends:
            break
        if number == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = _loss(model, entry.inputs(Draws(number, device)), number)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        _wait(device)
        seconds = time.perf_counter() - began
        if number < WARM_UP:
            result.warm_up += seconds
        else:
            result.seconds.append(seconds)
    result.losses = [float(loss) for loss in losses]
    if device.type == "cuda":
        result.peak = torch.cuda.max_memory_allocated()
    if setting.fused:
        used = fusion_of(model)
        result.words = f"{result.words}; {', '.join(used.used()) if used else 'nothing'}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _loss(model: Any, given: Mapping[str, Any], number: int = 0) -> torch.Tensor:
    """Mean squared error against noise, under autocast as Accelerate's, with the outputs in fp32."""
    device = given["hidden_states"].device
    with torch.autocast(device.type, torch.bfloat16):
        out = model(**given, return_dict=False)[0]
    generator = torch.Generator(device).manual_seed(10_000 + number)
    target = torch.randn(out.shape, generator=generator, device=device)
    return (out.float() - target).square().mean()


def _prepare(
    model: Any, entry: Model, setting: Setting, optimizer: torch.optim.Optimizer, result: Result
) -> None:
    device = next(model.parameters()).device
    if setting.compiled:
        torch._dynamo.reset()
        for block in _blocks(model):
            backend = "inductor" if device.type == "cuda" else "aot_eager"
            block.compile(backend=backend, dynamic=False)
    if setting.fused:
        on_cpu = dict.fromkeys(entry.ops, "on")  # by themselves they need a GPU
        # The check of the first forwards is off: here the losses of the settings are compared.
        fuse(model, None if device.type == "cuda" else on_cpu, check=False)
    mode = setting.checkpointing
    if mode == "auto":
        mode, result.words = _advised(model, entry, optimizer)
    else:
        result.words = f"checkpointing {mode}"
    set_checkpointing(model, mode)


def _blocks(model: Any) -> Sequence[torch.nn.Module]:
    return model.blocks if hasattr(model, "blocks") else model.transformer_blocks


def _advised(model: Any, entry: Model, optimizer: torch.optim.Optimizer) -> tuple[Any, str]:
    """The advisor's mode for a step of these shapes, and its words."""
    device = next(model.parameters()).device
    given = entry.inputs(Draws(0, device))
    tensors = {n: value for n, value in given.items() if isinstance(value, torch.Tensor)}
    others = {n: value for n, value in given.items() if n not in tensors}

    def losses(transformer: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            out = transformer(**batch, **others, return_dict=False)[0]
        return out.float().square().mean()

    free = psutil.virtual_memory().available
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        free -= torch.cuda.memory_allocated(device)
    spec = {n: (tensor.shape, tensor.dtype) for n, tensor in tensors.items()}
    needs = measure(model, losses, spec, device)
    advice = advise(needs, max(0, free - bytes_to_come(optimizer)), "auto")
    return advice.mode, f"checkpointing {advice.words}"


def _reset(model: Any, trained: Mapping[str, torch.Tensor]) -> None:
    """The model as it was built; what a setting held goes back to the device."""
    unfuse(model)
    set_checkpointing(model, "none")
    for block in _blocks(model):
        block._compiled_call_impl = None
    for name, parameter in model.named_parameters():
        if name in trained:
            parameter.data.copy_(trained[name])
            parameter.grad = None
    gc.collect()
    if next(model.parameters()).is_cuda:
        torch.cuda.empty_cache()


def _markdown(
    results: Sequence[Result], chosen: Mapping[str, Model], device: torch.device, steps: int
) -> str:
    sizes = "; ".join(f"{name} {entry.shape}, rank {entry.rank}" for name, entry in chosen.items())
    lines = [
        f"# LoRA training steps on {_device_name(device)}, {datetime.date.today()}", "",
        f"`{shlex.join(['python', '-m', 'benchmarks.step', *sys.argv[1:]])}`, commit {_said('git', 'describe', '--always', '--dirty')}, "
        f"driver {_said('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader') if device.type == 'cuda' else '-'}, "
        f"torch {torch.__version__}, {platform.python_version()}.", "",
        f"Random weights: {sizes}. Median of {steps} steps after {WARM_UP}; the settings are told in "
        "benchmarks/step.py. The last column is the largest relative difference of a step's loss from the example's.", "",
        "| model | setting | s a step (lowest to highest) | example / this | peak GiB | warm-up, s | what ran | loss, relative difference |",
        "|---|---|---:|---:|---:|---:|---|---:|",
    ]  # fmt: skip
    for result in results:
        example = next(r for r in results if r.model == result.model)
        lines.append(_row(result, example, steps))
    lines += ["", f"Advice counts {SHARE:.0%} of the free memory as there for activations."]
    return "\n".join(lines) + "\n"


def _row(result: Result, example: Result, steps: int) -> str:
    time_cell, ratio = _time_cell(result, steps), "-"
    if result.seconds and example.seconds:
        ratio = f"{statistics.median(example.seconds) / statistics.median(result.seconds):.3f}"
    difference = result.difference(example)
    cells = [
        result.model, result.setting, time_cell, ratio,
        "-" if result.peak is None else f"{result.peak / 2**30:.1f}",
        f"{result.warm_up:.1f}" if result.losses else "-", result.words or "-",
        "-" if difference is None else f"{difference:.1e}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _time_cell(result: Result, steps: int) -> str:
    if result.failed:
        return f"failed: {result.failed.replace('|', '/')}"
    if not result.fits:
        return "does not fit"
    if not result.seconds:
        return "left out, the time was up"
    low, high = min(result.seconds), max(result.seconds)
    cell = f"{statistics.median(result.seconds):.3f} ({low:.3f} to {high:.3f})"
    return cell if len(result.seconds) == steps else f"{cell}, {len(result.seconds)} steps"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().partition("\n")[0]


def _path(folder: Path, device: torch.device) -> Path:
    name = re.sub(r"[^A-Za-z0-9]+", "-", _device_name(device)).strip("-").lower()
    return folder / f"step_{name}_{datetime.date.today()}.md"


def _write(folder: Path, device: torch.device, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _path(folder, device).write_text(text)


def _draw(folder: Path, device: torch.device, results: Sequence[Result]) -> None:
    """A picture of the losses, where matplotlib is installed."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    models = list(dict.fromkeys(result.model for result in results))
    figure, axes = pyplot.subplots(1, len(models), figsize=(4 * len(models), 3), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for result in results:
            if result.model == model and result.losses:
                axis.plot(result.losses, label=result.setting)
        axis.set(title=model, xlabel="step", ylabel="loss")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(_path(folder, device).with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
