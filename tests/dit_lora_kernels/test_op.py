"""The two ways of a call: past torch.library where nothing would see it, through it where something does."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from dit_lora_kernels import support
from dit_lora_kernels.ada_norm import AdaNormInputs, joint_ada_norm
from dit_lora_kernels.finite_norm import finite_norms, finite_norms_op
from dit_lora_kernels.qk_norm_rope import qk_norm_rope
from dit_lora_kernels.relu_linear_attention import relu_linear_attention
from dit_lora_kernels.silu_dwconv_glu import (
    silu_dwconv_glu,
    silu_dwconv_glu_backward,
    silu_dwconv_glu_forward,
)


class Seen(TorchDispatchMode):
    """The ops of ours that a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "dit_lora":
            self.ops.append(func._schema.name.removeprefix("dit_lora::"))
        return func(*args, **(kwargs or {}))


def noise(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(size, generator=generator)


def leaves(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [noise(*size, seed=i).bfloat16().requires_grad_() for i, size in enumerate(sizes)]


def _ada() -> tuple[list[Tensor], Callable[..., Any]]:
    inputs = leaves((2, 3, 24), (2, 5, 24), (2, 3, 24), (2, 1, 24), (2, 24), (24,))

    def run(x: Tensor, text: Tensor, y: Tensor, gate: Tensor, scale: Tensor, w: Tensor) -> Any:
        streams = [AdaNormInputs(x, None, scale, y, gate), AdaNormInputs(text, scale.detach())]
        output, residuals = joint_ada_norm(streams, w, norm="layer", eps=1e-5)
        return output, *residuals

    return inputs, run


def _qk() -> tuple[list[Tensor], Callable[..., Any]]:
    angles = noise(4, 4).repeat_interleave(2, -1)

    def run(x: Tensor, weight: Tensor) -> Any:
        options = {"norm": "rms", "eps": 1e-6, "first": 1}
        frozen = qk_norm_rope(x, weight.detach(), None, angles.cos(), angles.sin(), **options)
        return frozen, qk_norm_rope(x, weight, **{**options, "first": 0})

    return leaves((2, 5, 3, 8), (8,)), run


def _relu() -> tuple[list[Tensor], Callable[..., Any]]:
    return leaves(*[(2, 7, 3, 8)] * 3), lambda *qkv: (relu_linear_attention(*qkv),)


def _glu() -> tuple[list[Tensor], Callable[..., Any]]:
    return leaves((2, 5, 3, 12), (12, 1, 3, 3), (12,)), lambda *args: (silu_dwconv_glu(*args),)


CASES = {
    "ada_norm": _ada,
    "qk_norm_rope": _qk,
    "relu_linear_attention": _relu,
    "silu_dwconv_glu": _glu,
}


def results(name: str, context: AbstractContextManager[Any]) -> tuple[list[Tensor], list[Any]]:
    """Values and gradients of a case, and what was saved for its backward pass."""
    inputs, run = CASES[name]()
    saved: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tensor.shape, tensor.dtype, tensor.stride()))
        return tensor

    with context, saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run(*inputs)
        cotangents = [noise(*output.shape, seed=7).to(output.dtype) for output in outputs]
        gradients = torch.autograd.grad(outputs, inputs, cotangents)
    return [*outputs, *gradients], saved


@pytest.mark.parametrize("name", CASES)
def test_both_ways_are_the_same_bits_and_save_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Seen()
    through, saved_through = results(name, recorder)
    assert {name, f"{name}_backward"} <= set(recorder.ops)
    refuse_library(monkeypatch)
    past, saved_past = results(name, torch.enable_grad())
    assert all(map(torch.equal, past, through))
    assert saved_past == saved_through


def refuse_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call through torch.library raise."""

    def refused(*_: Any) -> None:
        raise AssertionError("through torch.library")

    def call(self: support.Op, *args: Any) -> Any:
        monkeypatch.setattr(self, "library", refused)
        return real(self, *args)

    real = support.Op.__call__
    monkeypatch.setattr(support.Op, "__call__", call)


def test_without_gradients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, run = _glu()
    expected = run(*inputs)[0]
    refuse_library(monkeypatch)
    with torch.no_grad():
        assert torch.equal(run(*inputs)[0], expected)
    with torch.inference_mode():
        assert torch.equal(run(*inputs)[0], expected)
    values = [noise(4, 3), noise(5, 3)]
    assert torch.allclose(finite_norms(values, [0, 1], 2), torch.stack([v.norm() for v in values]).double())
    assert finite_norms_op.library is not None


class Own(Tensor):
    """A tensor of somebody's own."""


def _fake() -> Any:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return mode.from_tensor(noise(1, 3, 3, 4))


WATCHED: dict[str, Callable[[], tuple[AbstractContextManager[Any], Any]]] = {
    "a dispatch mode": lambda: (Seen(), noise(1, 3, 3, 4)),
    "a fake tensor outside of its mode": lambda: (torch.no_grad(), _fake()),
    "a subclass": lambda: (torch.no_grad(), noise(1, 3, 3, 4).as_subclass(Own)),
    "meta": lambda: (torch.no_grad(), noise(1, 3, 3, 4).to("meta")),
    "a negated view": lambda: (
        torch.no_grad(),
        torch.complex(noise(1, 3, 3, 4), noise(1, 3, 3, 4)).conj().imag,
    ),
    "a profile": lambda: (profile(activities=[ProfilerActivity.CPU]), noise(1, 3, 3, 4)),
}


@pytest.mark.parametrize("what", WATCHED)
def test_what_watches_sees_the_op(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context, h = WATCHED[what]()
    calls = []
    library = silu_dwconv_glu_forward.library
    monkeypatch.setattr(silu_dwconv_glu_forward, "library", lambda *args: calls.append(1) or library(*args))
    weight = noise(4, 1, 3, 3)
    plain = silu_dwconv_glu(noise(1, 3, 3, 4), nn.Parameter(weight))
    assert not calls
    with context:
        watched = silu_dwconv_glu(h, weight)
    assert calls == [1]
    assert watched.shape == plain.shape


def test_transforms_see_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    library = silu_dwconv_glu_forward.library
    monkeypatch.setattr(silu_dwconv_glu_forward, "library", lambda *args: calls.append(1) or library(*args))
    weight = noise(4, 1, 3, 3)
    with pytest.raises(RuntimeError, match="functorch transforms"):  # torch.library's own refusal
        torch.func.grad(lambda h: silu_dwconv_glu(h, weight).sum())(noise(1, 3, 3, 4))
    assert calls == [1]
    torch.jit.trace(lambda h: silu_dwconv_glu(h, weight), (noise(1, 3, 3, 4),), check_trace=False)
    assert calls == [1, 1]


@pytest.mark.parametrize("name", ["qk_norm_rope", "silu_dwconv_glu"])
def test_a_second_derivative_is_refused_in_the_same_words(name: str) -> None:
    messages = []
    for context in (torch.enable_grad(), Seen()):
        inputs, run = CASES[name]()
        with context:
            (first_grad, *_) = torch.autograd.grad(
                sum(output.float().square().sum() for output in run(*inputs)),
                inputs,
                create_graph=True,
            )
            with pytest.raises(RuntimeError) as error:
                first_grad.float().square().sum().backward()
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert f"dit_lora.{name}_backward" in messages[0]


def test_an_op_without_a_gradient_says_so() -> None:
    """Where a gradient is asked of it: past torch.library it would come without one."""
    inputs, _ = _glu()
    (gradient,) = silu_dwconv_glu_backward(noise(2, 5, 3, 6), *inputs, [True, False, False])
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A kernel that compiles to something that notes what it is called with."""

    class Kernel:
        arg_names = ("x", "y", "n", "m", "SIZE", "FLAG")

        def __init__(self) -> None:
            self.compiled: list[Any] = []
            self.called: list[tuple[Any, ...]] = []

        def __getitem__(self, grid: Any) -> Any:
            def compile_and_run(*args: Any, **constants: Any) -> Any:
                self.compiled.append((grid, args, constants))
                return {
                    (*grid, 1): lambda *inputs: self.called.append(("2", *inputs)),
                    (*grid, 1, 1): lambda *inputs: self.called.append(("1", *inputs)),
                }

            return compile_and_run

    monkeypatch.setattr(support, "_LAUNCHES", {})
    monkeypatch.setattr(support, "triton", SimpleNamespace(__version__="3.9.0"))
    support._can_reuse_compiled.cache_clear()
    yield Kernel()
    support._can_reuse_compiled.cache_clear()


def test_a_second_launch_of_the_same_shape_calls_the_compiled_kernel(kernel: Any) -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    launch_options = {"FLAG": True, "SIZE": 16, "num_warps": 4}
    support.launch(kernel, (5,), x, y, 1, 16, **launch_options)
    assert [len(kernel.compiled), len(kernel.called)] == [1, 0]
    support.launch(kernel, (5,), y, x, 1, 16, **launch_options)
    assert len(kernel.compiled) == 1
    # In the kernel's order, whatever the order by name.
    assert kernel.called == [("1", y, x, 1, 16, 16, True)]


def test_what_triton_compiles_for_is_looked_up_anew(kernel: Any) -> None:
    x = torch.zeros(8)
    launch_options = {"SIZE": 16, "FLAG": True, "num_warps": 4}
    first_args = (x, x, 1, 16)
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (first_args, launch_options),
        ((x[1:], x, 1, 16), launch_options),  # 4 bytes off
        ((x, x.bfloat16(), 1, 16), launch_options),
        ((x, None, 1, 16), launch_options),
        ((x, x, 2, 16), launch_options),
        ((x, x, 1, 17), launch_options),
        (first_args, launch_options | {"SIZE": 32}),
        (first_args, launch_options | {"num_warps": 8}),
    ]
    for args, constants in launches:
        support.launch(kernel, (5,), *args, **constants)
    assert len(kernel.compiled) == len(launches)
    assert not kernel.called


def test_versions_that_were_not_tried_look_up_each_time(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "triton", SimpleNamespace(__version__="3.10.1"))
    support._can_reuse_compiled.cache_clear()
    for _ in range(2):
        support.launch(kernel, (5,), torch.zeros(8), None, 1, 1, SIZE=1, FLAG=False)
    assert [len(kernel.compiled), len(kernel.called)] == [2, 0]
