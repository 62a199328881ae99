"""What kernels rest on: Triton or its stand-ins, and the GPU that a tensor is on."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dit_lora_kernels
from dit_lora_kernels.support import accumulator, launches, on_its_device, tl, triton_support

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
from dit_lora_kernels.ada_norm import ada_norm
x = torch.randn(2, 3, 8, requires_grad=True)
ada_norm(x, torch.ones(2, 8), torch.ones(2, 8), norm="layer", eps=1e-6).sum().backward()
assert torch.isfinite(x.grad).all()
others = [n for n in sys.modules if n.split(".")[0] in ("diffusers", "peft", "dit_lora", "transformers")]
assert not others, others
print(*triton_support())
"""


def test_without_triton_every_op_imports_and_runs_by_its_reference() -> None:
    """And without anything else of ours."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON.format(ops=OPS)],
        env={"PYTHONPATH": str(Path(dit_lora_kernels.__path__[0]).parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "none triton is not installed\n"


def test_every_op_of_the_package_is_in_the_list() -> None:
    found = {path.stem for path in Path(dit_lora_kernels.__path__[0]).glob("*.py")}
    assert found == {*OPS, "__init__", "support", "fp8"}  # the last are products of lora_linear


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles on a GPU")
def test_in_the_interpreter_kernels_run_on_a_cpu() -> None:
    assert triton_support().mode == "interpreter"
    assert launches(torch.ones(1))


def test_kernels_compute_in_fp32_and_in_fp64_for_fp64() -> None:
    halves = (torch.bfloat16, torch.float16, torch.float32)
    assert {accumulator(dtype) for dtype in halves} == {tl.float32}
    assert accumulator(torch.float64) is tl.float64


def test_a_launch_is_on_its_tensors_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another GPU current, Triton would read the wrong one's memory."""
    seen = []

    class Recorded(torch.cuda.device_of):
        def __init__(self, obj: torch.Tensor) -> None:
            seen.append(obj)
            super().__init__(obj)

    monkeypatch.setattr(torch.cuda, "device_of", Recorded)
    second = torch.ones(2)

    @on_its_device
    def launcher(number: int, pair: tuple[None, torch.Tensor], *, add: int) -> int:
        return number + add

    assert launcher(3, (None, second), add=4) == 7
    assert seen == [second]
