"""`ada_norm` against fp64 and the stock lines: accuracy, gradients, addressing of rows and tables."""

from typing import Any

import pytest
import torch
from ada_norm_cases import (
    CASE,
    CASES,
    DEVICE,
    Case,
    assert_same,
    cotangents,
    eager,
    joint,
    make,
    ours,
    results,
)
from kernel_checks import assert_as_good_as_eager, in_nan_arena, poisoned_memory
from torch import Tensor

from dit_lora_kernels import ada_norm as op

pytestmark = pytest.mark.usefixtures("several_rows_a_program")


# In fp16 kernels run the same lines; hard values of fp16 have tests of their own.
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.thorough)],
    ids=str,
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_good_as_eager(case: Case, dtype: torch.dtype) -> None:
    tensors = make(case, dtype)
    exact_inputs = {k: v.detach().double().requires_grad_() for k, v in tensors.items()}
    exact = results(eager, case.norm, exact_inputs)
    stock = results(eager, case.norm, tensors)
    for name, value in results(ours, case.norm, tensors).items():
        assert value.dtype is dtype
        assert_as_good_as_eager(name, value, stock[name], exact[name])


def test_the_norm_is_that_of_the_row_as_it_is_stored() -> None:
    tensors = make(CASE, torch.bfloat16)
    output, residual = ours("layer", **tensors)
    tables = {k: v for k, v in tensors.items() if k not in ("x", "y", "gate")}
    assert torch.equal(output, ours("layer", x=residual.detach(), **tables)[0])


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("groups", [1, 3])
def test_gradcheck(norm: str, groups: int) -> None:
    tensors = make(Case(norm, (2, 9, 5), groups), torch.float64)
    names = list(tensors)

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        return ours(norm, **dict(zip(names, values, strict=True)))

    assert torch.autograd.gradcheck(run, tuple(tensors.values()), fast_mode=True)


def test_streams_write_into_one_buffer_in_their_order() -> None:
    tensors = make(CASE, torch.float64)
    text = make(Case("layer", (2, 3, 40), without="weight bias y gate"), torch.float64)
    affine = {k: tensors[k] for k in ("weight", "bias")}
    outputs = joint(tensors, text)
    text_result, second = eager("layer", **text, **affine), eager("layer", **tensors)
    expected = (torch.cat([text_result[0], second[0]], 1), text_result[1], second[1])
    leaves = [*tensors.values(), *text.values()]
    weights = cotangents(expected)
    for value, expected_value in zip(outputs, expected, strict=True):
        torch.testing.assert_close(value, expected_value)
    for value, expected_value in zip(
        torch.autograd.grad(outputs, leaves, weights),
        torch.autograd.grad(expected, leaves, weights),
        strict=True,
    ):
        torch.testing.assert_close(value, expected_value)


def test_x_without_y_is_handed_on_in_place_and_its_other_gradient_costs_no_pass() -> None:
    tensors = make(CASE)
    text = make(Case("layer", (2, 3, 40), without="weight bias y gate"))
    _, residual, _ = joint(tensors, text)
    assert residual.data_ptr() == text["x"].data_ptr()
    assert residual.grad_fn is not None
    assert "_AdaNorm" in residual.grad_fn.name()


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_alone(used: int) -> None:
    tensors = make(CASE, torch.float64)
    leaves = list(tensors.values())
    weight = cotangents(eager("layer", **tensors))[used]
    grads = torch.autograd.grad(ours("layer", **tensors)[used], leaves, weight, allow_unused=True)
    exact = torch.autograd.grad(eager("layer", **tensors)[used], leaves, weight, allow_unused=True)
    for name, grad, expected_value in zip(tensors, grads, exact, strict=True):
        torch.testing.assert_close(
            grad, torch.zeros_like(grad) if expected_value is None else expected_value, msg=name
        )


@pytest.mark.parametrize("name", list(make(CASE)))
@pytest.mark.parametrize("kernel", [True, False])
def test_each_gradient_alone(name: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        monkeypatch.setattr(op, "launches", lambda tensor: False)
    tensors = make(CASE)
    everything = results(ours, "layer", tensors)
    leaves = {k: v.detach().requires_grad_(k == name) for k, v in tensors.items()}
    assert_same(results(ours, "layer", leaves), {k: everything[k] for k in ("out", "residual", f"d_{name}")})


def test_an_ungated_y_of_another_dtype_has_its_own_gradient() -> None:
    tensors = make(Case("layer", (2, 7, 40), without="gate"))
    tensors["y"] = tensors["y"].detach().bfloat16().requires_grad_()
    actual = results(ours, "layer", tensors)
    assert torch.equal(actual["d_y"], actual["d_x"].bfloat16()) or DEVICE == "cpu"
    torch.testing.assert_close(actual["d_y"].float(), actual["d_x"], rtol=2**-7, atol=1e-6)


def test_fp32_tables_and_bf16_rows() -> None:
    """Wan keeps its tables and norms in fp32; each gradient has the dtype of its tensor."""
    tensors = make(Case("layer", (2, 6, 1152), 2))
    for name in ("x", "y"):
        tensors[name] = tensors[name].detach().bfloat16().requires_grad_()
    exact_inputs = {k: v.detach().double().requires_grad_() for k, v in tensors.items()}
    exact = results(eager, "layer", exact_inputs)
    stock = results(lambda norm, **t: tuple(v.bfloat16() for v in eager(norm, **t)), "layer", tensors)
    for name, value in results(ours, "layer", tensors).items():
        assert value.dtype is (tensors[name[2:]].dtype if name[:2] == "d_" else torch.bfloat16)
        assert_as_good_as_eager(name, value, stock[name], exact[name])


def test_nothing_is_left_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in (CASE, Case("rms", (2, 9, 40), 3)):
        clean = results(ours, case.norm, make(case))
        with poisoned_memory(monkeypatch):
            assert_same(results(ours, case.norm, make(case)), clean)


@pytest.mark.parametrize("case", [CASE, Case("rms", (3, 9, 40), 3)], ids=str)
def test_nothing_is_read_from_elsewhere(case: Case) -> None:
    tensors = make(case)
    apart = {k: in_nan_arena(v).detach().requires_grad_() for k, v in tensors.items()}

    def run(norm: str, **values: Tensor) -> tuple[Tensor, Tensor]:
        output, residual = ours(norm, **values)
        return Apart.apply(output), Apart.apply(residual)

    assert_same(results(run, case.norm, apart), results(ours, case.norm, tensors))


class Apart(torch.autograd.Function):
    """The identity, whose gradient's rows lie apart in NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return in_nan_arena(grad)


@pytest.mark.parametrize("unsqueezed", [True, False])
def test_tables_are_chunks_of_one_linear(unsqueezed: bool) -> None:
    tensors = make(CASE)
    names = ("shift", "scale", "gate")
    packed = torch.cat([tensors[k].detach()[:, 0] for k in names], -1).requires_grad_()
    chunks = dict(zip(names, packed.chunk(3, dim=1), strict=True))
    views = {k: v.unsqueeze(1) if unsqueezed else v for k, v in chunks.items()}
    outputs = ours("layer", **(tensors | views))
    (grad,) = torch.autograd.grad(outputs, packed, cotangents(outputs))
    expected = results(ours, "layer", tensors)
    assert torch.equal(outputs[0], expected["out"])
    assert torch.equal(grad, torch.cat([expected[f"d_{k}"][:, 0] for k in names], -1))


def test_one_row_for_all_tokens_beside_a_row_for_each() -> None:
    tensors = make(Case("layer", (2, 6, 40), 3))
    expanded = {k: v.detach().clone().requires_grad_() for k, v in tensors.items()}
    tensors["gate"] = tensors["gate"].detach()[:, 1].requires_grad_()
    expanded["gate"] = tensors["gate"].detach()[:, None].repeat(1, 3, 1).requires_grad_()
    single, three = results(ours, "layer", tensors), results(ours, "layer", expanded)
    three["d_gate"] = three["d_gate"].sum(1)
    assert_same(single, three)


@pytest.mark.parametrize("kind", ["fused rows", "transposed", "expanded"])
def test_strides(kind: str) -> None:
    tensors = make(CASE)
    (B, T, D), views = CASE.shape, dict(tensors)
    for name in ("x", "y"):
        if kind == "fused rows":
            views[name] = torch.cat([tensors[name].detach()] * 3, -1)[..., D : 2 * D]
        elif kind == "transposed":
            views[name] = tensors[name].detach().transpose(1, 2).contiguous().transpose(1, 2)
        else:
            views[name] = tensors[name].detach()[:, :1].expand(B, T, D)
        views[name].requires_grad_()
    plain = {k: v.detach().contiguous().requires_grad_() for k, v in views.items()}
    assert_same(results(ours, "layer", views), results(ours, "layer", plain))


def test_expanded_gradients() -> None:
    """A sum's gradient has no stride at all, a token mean's has none over tokens."""
    tensors = make(CASE)
    leaves = list(tensors.values())
    for weights in (torch.ones(()), cotangents((torch.empty(2, 1, 40, device=DEVICE),))[0]):
        expanded = weights.to(DEVICE).expand(CASE.shape)
        grads = torch.autograd.grad(ours("layer", **tensors), leaves, [expanded, expanded])
        contiguous = [expanded.contiguous()] * 2
        for grad, expected_value in zip(
            grads, torch.autograd.grad(ours("layer", **tensors), leaves, contiguous), strict=True
        ):
            assert torch.equal(grad, expected_value)
