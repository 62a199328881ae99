"""Host time of ops and of whole models, stock and fused, without a GPU.

    python -m benchmarks.host [--ops] [--models NAME ...] [--rounds N] [--label WORDS]

Process CPU time, one thread, forward and backward, at widths at which arithmetic takes almost no time. Our ops take a
GPU tensor's path up to the driver (`host_driver`); the launch itself and the driver's work are not counted. PyTorch's
ops run as small CPU ops where a GPU's would be launched, in the stock code and in ours. Norms and attention of the
stock code are one op, as on a GPU. Settings take turns, and the quickest fifth of the samples is averaged, because
other work on the machine only adds time.
"""

import argparse
import datetime
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from benchmarks.host_driver import launch_on_cpu
from benchmarks.step_models import Draws, Model, _cogvideox, _sana
from dit_lora.fuse.api import fuse
from dit_lora.training.execution.activation_checkpointing import set_checkpointing

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "bench"))

import cases
from diffusers import (
    CogVideoXTransformer3DModel,
    DiTTransformer2DModel,
    SanaTransformer2DModel,
)
from shapes import TINY

CPU = torch.device("cpu")
_DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "sample_size": 4,
    "patch_size": 2,
    "num_embeds_ada_norm": 10,
}
_SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "num_layers": 20,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 32,
    "cross_attention_dim": 64,
    "caption_channels": 32,
    "sample_size": 4,
}
_COGVIDEOX = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 64,
    "text_embed_dim": 32,
    "num_layers": 42,
    "patch_size": 2,
    "sample_width": 4,
    "sample_height": 4,
    "sample_frames": 1,
    "max_text_seq_length": 8,
    "use_rotary_positional_embeddings": True,
}


def _dit(draws: Draws) -> dict[str, Any]:
    return {
        "hidden_states": draws.normal(2, 4, 4, 4),
        "timestep": draws.integers(1000, 2),
        "class_labels": draws.integers(10, 2),
    }


_JOINT = ("lora_linear", "qk_norm_rope", "ada_norm")
_LINEAR = ("lora_linear", "ada_norm", "relu_linear_attention", "silu_dwconv_glu")
MODELS = {
    "DiT, 28 blocks": Model(DiTTransformer2DModel, _DIT, _dit, "", ("lora_linear", "ada_norm"), rank=8),
    "Sana, 20": Model(SanaTransformer2DModel, _SANA, _sana(_SANA, 2, 8), "", _LINEAR, rank=8),
    "CogVideoX, 42": Model(CogVideoXTransformer3DModel, _COGVIDEOX, _cogvideox(_COGVIDEOX, 1, 4, 4), "",
                           _JOINT, rank=8),
}  # fmt: skip


class Timed(NamedTuple):
    """Something to time, and what it is called."""

    name: str
    column: str
    run: Callable[[], object]


def op_calls() -> Iterator[Timed]:
    """Yield each op's forward and its forward and backward, stock and ours, under autocast as recipes have it."""
    shape = TINY._replace(batch=1, heads=2, glu=(4, 4, 16), rank=8)
    op_cases = {
        "joint_ada_norm": cases._ada_norm("tiny", shape, CPU, gated=True),
        "ada_norm": cases._ada_norm("tiny", shape._replace(tokens=(8,)), CPU, gated=True),
        "qk_norm_rope": cases._qk_norm_rope("tiny", shape, CPU),
        "relu_linear_attention": cases._linear_attention("tiny", shape, CPU),
        "silu_dwconv_glu": cases._glu("tiny", shape, CPU),
        "lora_qkv": cases._lora("tiny", shape, CPU, names="qkv"),
        "lora_linear": cases._lora("tiny", shape, CPU, names="o"),
        "finite_norms, 336 tensors": cases._finite_norms("tiny", shape._replace(layers=21), CPU),
    }
    for name, case in op_cases.items():
        for column, compute in (("stock", case.stock), ("ours", case.ours)):
            yield Timed(name, f"{column} forward", _forward(case, compute))
            if case.trained:
                yield Timed(name, f"{column} both", _both(case, compute))


def _forward(case: Any, compute: Any) -> Callable[[], object]:
    """A forward pass as in training: it builds an autograd graph if there are trained inputs."""
    inputs = {k: v.requires_grad_(k in case.trained) for k, v in case.given.items()}

    def run() -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return compute(inputs)

    return run


def _both(case: Any, compute: Any) -> Callable[[], object]:
    """A forward and backward pass."""
    forward = _forward(case, compute)
    inputs = [case.given[k] for k in case.trained]
    with torch.no_grad():
        pulls = [torch.randn_like(output) for output in forward()]  # type: ignore[attr-defined]

    def run() -> object:
        return torch.autograd.grad(forward(), inputs, pulls)  # type: ignore[call-overload]

    return run


def model_calls(name: str, entry: Model) -> Iterator[Timed]:
    """Yield a forward and backward pass of the model by setting."""
    inputs = entry.inputs(Draws(0, CPU))
    for column, is_fused in (("stock", False), ("fused", True)):
        model = entry.build(CPU)
        if is_fused:
            fuse(model, dict.fromkeys(entry.ops, "on"), check=False)
        for mode in ("none", "selective", "full"):
            yield Timed(f"{name}, {mode}", column, _step(model, inputs, mode))


def _step(model: Any, inputs: Any, mode: Any) -> Callable[[], object]:
    """A forward and backward pass that clears the gradients afterwards."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> float:
        began = time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**inputs, return_dict=False)[0]
        output.float().square().mean().backward()
        seconds = time.process_time() - began
        for parameter in parameters:
            parameter.grad = None
        return seconds

    def run() -> float:
        set_checkpointing(model, mode)
        step()  # what came before was another model's, and a loop's steps follow each other
        return step()

    return run


def measure(calls: list[Timed], rounds: int, inner: int) -> dict[tuple[str, str], float]:
    """Milliseconds of CPU time per call: mean of the fastest fifth of the rounds, with the calls in turn."""
    samples: dict[tuple[str, str], list[float]] = {(c.name, c.column): [] for c in calls}
    for call in calls:  # compiles, and makes what is kept
        for _ in range(3):
            call.run()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for call in calls:
            if inner == 1:  # as in a loop, where the same was run just before; collecting leaves the caches cold
                gc.collect()
                call.run()
            began = time.process_time()
            for _ in range(inner):
                times = call.run()
            seconds = times if isinstance(times, float) else (time.process_time() - began) / inner
            samples[call.name, call.column].append(1e3 * seconds)
            if inner == 1:
                gc.collect()
    gc.enable()
    return {key: statistics.mean(sorted(durations)[: max(1, rounds // 5)]) for key, durations in samples.items()}


def _table(times: dict[tuple[str, str], float], columns: list[str], unit: float) -> list[str]:
    """Markdown lines with one row per name; the last column is our time divided by stock's."""
    lines = [f"| | {' | '.join(columns)} | ours / stock |", "|---|" + "---:|" * (len(columns) + 1)]
    for name in dict.fromkeys(name for name, _ in times):
        values = [times.get((name, column)) for column in columns]
        cells = ["-" if v is None else f"{v * unit:.3g}" for v in values]
        present = [v for v in values if v is not None]
        ratio = present[-1] / present[-2]
        lines.append(f"| {name} | {' | '.join(cells)} | {ratio:.2f} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ops", action="store_true", help="ops; without this and --models, all")
    parser.add_argument("--models", nargs="*", default=None, help="of DiT, Sana, CogVideoX")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--label", default="", help="what the code is, for the table's head")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # what no kernel has written may be anything
    launch_on_cpu()
    everything = not args.ops and args.models is None
    print(
        f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, triton {triton.__version__} {args.label}\n"
    )
    if args.ops or everything:
        times = measure(list(op_calls()), args.rounds, 50)
        columns = ["stock forward", "ours forward", "stock both", "ours both"]
        print("\n".join(["us of CPU time a call\n", *_table(times, columns, 1e3)]), flush=True)
    chosen = [n for n in MODELS if everything or n.split(",")[0] in (args.models or ())]
    for name in chosen:
        times = measure(list(model_calls(name, MODELS[name])), args.rounds, 1)
        print("\n".join(["", *_table(times, ["stock", "fused"], 1)]), flush=True)


if __name__ == "__main__":
    main()
