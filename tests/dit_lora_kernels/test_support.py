"""What kernels rest on: Triton or its stand-ins, and the GPU that a tensor is on."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dit_lora_kernels
from dit_lora_kernels.support import (
    Prepared,
    accumulation_triton_dtype,
    launches,
    tl,
    triton_support,
)

OPS = (
    "ada_norm",
    "finite_norm",
    "lora_linear",
    "qk_norm_rope",
    "relu_linear_attention",
    "silu_dwconv_glu",
)
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import importlib, torch
from dit_lora_kernels import triton_support
for op in {ops}:
    importlib.import_module("dit_lora_kernels." + op)
from dit_lora_kernels.ada_norm import AdaNormInputs, joint_ada_norm
x = torch.randn(2, 3, 8, requires_grad=True)
stream = AdaNormInputs(x, torch.ones(2, 8), torch.ones(2, 8))
joint_ada_norm([stream], norm="layer", eps=1e-6)[0].sum().backward()
assert torch.isfinite(x.grad).all()
others = [n for n in sys.modules if n.split(".")[0] in ("diffusers", "peft", "dit_lora", "transformers")]
assert not others, others
print(*triton_support())
"""


def test_without_triton_every_op_imports_and_runs_by_its_reference() -> None:
    """And without anything else of ours."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON.format(ops=OPS)],
        env={"PYTHONPATH": str(Path(dit_lora_kernels.__path__[0]).parent)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "none triton is not installed\n"


def test_every_op_of_the_package_is_in_the_list() -> None:
    module_names = {path.stem for path in Path(dit_lora_kernels.__path__[0]).glob("*.py")}
    # Kernels of two ops, and the products of lora_linear in fp8.
    parts = {"ada_norm_kernels", "qk_norm_rope_kernels", "fp8"}
    assert module_names == {*OPS, "__init__", "support", *parts}


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles on a GPU")
def test_in_the_interpreter_kernels_run_on_a_cpu() -> None:
    assert triton_support().mode == "interpreter"
    assert launches(torch.ones(1))


def test_kernels_compute_in_fp32_and_in_fp64_for_fp64() -> None:
    halves = (torch.bfloat16, torch.float16, torch.float32)
    assert {accumulation_triton_dtype(dtype) for dtype in halves} == {tl.float32}
    assert accumulation_triton_dtype(torch.float64) is tl.float64


def test_a_launch_is_on_its_tensors_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another GPU current, Triton would read the wrong one's memory."""
    events: list[Any] = []

    class Elsewhere(torch.Tensor):
        def get_device(self) -> int:
            return 1

    class Current:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            events.append(self.index)
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()
            events.append("back")

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: events.append((grid, args, constants))

    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Current)
    second = torch.ones(2).as_subclass(Elsewhere)
    launch = Prepared(Kernel(), (5,), (7,), {"SIZE": 4})
    launch(second, None)
    assert events == [1, ((5,), (second, None, 7), {"SIZE": 4}), "back"]
    events.clear()
    current.append(1)
    launch(second, None)
    assert len(events) == 1
