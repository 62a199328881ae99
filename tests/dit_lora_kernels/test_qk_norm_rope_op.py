"""qk_norm_rope as an operator: autocast, compile, saved bytes, the path without kernels, what it refuses, sm_90."""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch
from kernel_checks import (
    relative_error,
    saved_bytes,
)
from qk_norm_rope_cases import (
    COGVIDEOX,
    DEVICE,
    EPS,
    LAYERS,
    SMALL,
    Layer,
    alike,
    operands,
    ours,
    results,
    stock,
)
from torch import Tensor

from dit_lora_kernels import qk_norm_rope as module
from dit_lora_kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference


@pytest.mark.parametrize("name", ["cogvideox, text first", "mistral"])
def test_autocast_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[name]
    inputs = operands(layer).to(torch.float32)
    for on_kernels in (True, False):
        if not on_kernels:
            monkeypatch.setattr(module, "launches", lambda tensor: False)
        clean = results(lambda *t: ours(layer, *t), inputs)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            alike(clean, results(lambda *t: ours(layer, *t), inputs))


@pytest.mark.parametrize("from_output", [True, False])
@pytest.mark.parametrize("name", ["cogvideox, text first", "wan", "mistral"])
def test_opcheck(name: str, from_output: bool) -> None:
    layer = replace(LAYERS[name], batch=1, tokens=2, rows=1, first=0, tables=0)
    inputs = operands(layer).to(torch.float32, train=not from_output)
    options = tuple(layer.options.values())
    torch.library.opcheck(
        module._forward_op.library, (*inputs.inputs(), *options, from_output and layer.norm != "none")
    )


@pytest.mark.parametrize(("train", "from_output"), [(False, True), (False, False), (True, True)])
def test_compile_without_a_graph_break(train: bool, from_output: bool) -> None:
    inputs = operands(SMALL).to(torch.float32, train)
    clean = results(lambda *t: ours(SMALL, *t, from_output=from_output), inputs)
    compiled = torch.compile(lambda *t: ours(SMALL, *t, from_output=from_output), fullgraph=True, backend="aot_eager")
    alike(clean, results(compiled, inputs))


def test_saved_bytes() -> None:
    def kept(layer: Layer, train: bool = False, from_output: bool = True) -> int:
        inputs = operands(layer).to(torch.bfloat16, train)
        saved_inputs = [t for t in (inputs.weight, inputs.bias, inputs.cos, inputs.sin) if t is not None]
        kept_out: list[Tensor] = []

        def run() -> Tensor:
            output = ours(layer, *inputs.inputs(), from_output=from_output)
            kept_out.append(output)
            return output

        total = saved_bytes(run, saved_inputs)
        num_bytes = saved_bytes(
            lambda: ours(layer, *inputs.inputs(), from_output=from_output),
            [*saved_inputs, inputs.x],
        )
        assert total - num_bytes in (0, inputs.x.numel() * 2)
        return total

    elements = 2 * 3 * 3 * 64
    assert kept(SMALL) == elements * 2 + 2 * 3 * 3 * 4  # the output, which attention saves too, and rstd
    assert kept(replace(SMALL, norm="rms", bias=False, across=True)) == elements * 2 + 2 * 3 * 4
    assert kept(SMALL, from_output=False) == elements * 2  # x, and no rstd
    assert kept(SMALL, train=True) == elements * 2
    assert kept(LAYERS["mistral"]) == 0


@pytest.mark.parametrize("name", LAYERS)
def test_without_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[name]
    monkeypatch.setattr(module, "launches", lambda tensor: False)
    for train, from_output in ((False, True), (layer.weight, False)):
        inputs = operands(layer).to(torch.float32, train)
        expected = results(lambda *t: stock(layer, *t), inputs)
        actual = results(lambda *t, f=from_output: ours(layer, *t, from_output=f), inputs)
        assert all(relative_error(actual[key], expected[key]) < 2e-6 for key in expected)


def test_the_reference_is_differentiable() -> None:
    for layer in LAYERS.values():
        inputs = operands(layer).to(torch.float64, train=True)
        expected = results(lambda *t, layer=layer: stock(layer, *t), inputs)
        actual = results(lambda *t, layer=layer: qk_norm_rope_reference(*t, **layer.options), inputs)
        assert all(relative_error(actual[key], expected[key]) < 1e-12 for key in expected)


def test_nothing_to_do() -> None:
    x = torch.randn(2, 3, 4, 8, device=DEVICE).transpose(1, 2)
    output = qk_norm_rope(x, norm="none", eps=EPS)
    assert torch.equal(output, x)
    assert output.is_contiguous()


@pytest.mark.parametrize("shape", [(0, 5, 3, 64), (2, 0, 3, 64)])
@pytest.mark.parametrize("train", [False, True])
def test_empty(shape: tuple[int, ...], train: bool) -> None:
    layer = replace(COGVIDEOX, batch=shape[0], tokens=shape[1], rows=min(3, shape[1]), first=0)
    inputs = operands(layer).to(torch.float32, train)
    if layer.rows == 0:
        inputs.cos = inputs.sin = None
    actual = results(lambda *t: ours(layer, *t), inputs)
    assert actual["out"].shape == actual["dx"].shape == shape
    assert not train or not actual["dweight"].any()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "x of three dimensions": ({"x": torch.zeros(2, 5, 24)}, r"x must be floating-point \(B, S, H, D\)"),
    "odd width": ({"x": torch.zeros(2, 5, 3, 7), "weight": None}, "even D"),
    "integers": ({"x": torch.zeros(2, 5, 3, 8, dtype=torch.int32)}, "floating.*int32"),
    "norm": ({"norm": "batch"}, "got 'batch'"),
    "rotation": ({"rotation": "whole"}, "got 'whole'"),
    "weight of heads": ({"weight": torch.zeros(24)}, r"weight must be \(8,\); got \(24,\)"),
    "weight of one head": ({"across_heads": True}, r"weight must be \(24,\); got \(8,\)"),
    "bias": ({"bias": torch.zeros(4)}, r"bias must be \(8,\); got \(4,\)"),
    "weight without norm": ({"norm": "none"}, "weight has no effect with norm 'none'"),
    "cos alone": ({"sin": None}, r"\(4, 8\) and None"),
    "tables that differ": ({"sin": torch.zeros(5, 8)}, r"\(4, 8\) and \(5, 8\)"),
    "half tables": ({"cos": torch.zeros(4, 4), "sin": torch.zeros(4, 4)}, r"got \(4, 4\)"),
    "tables of other samples": ({"cos": torch.zeros(3, 4, 8), "sin": torch.zeros(3, 4, 8)}, "1 or B"),
    "tables of other heads": (
        {"cos": torch.zeros(2, 4, 2, 4), "sin": torch.zeros(2, 4, 2, 4)},
        r"1 or H, D/2\) for x \(2, 5, 3, 8\); got \(2, 4, 2, 4\)",
    ),
    "an angle once, too far": (
        {"cos": torch.zeros(1, 4, 1, 4), "sin": torch.zeros(1, 4, 1, 4), "first": 2},
        "cover tokens 2 to 5, but x has tokens 0 to 4",
    ),
    "too far": ({"first": 2}, "cover tokens 2 to 5, but x has tokens 0 to 4"),
    "before the first": ({"first": -1}, "cover tokens -1 to 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, message = REFUSED[name]
    inputs: dict[str, Any] = {
        "x": torch.zeros(2, 5, 3, 8),
        "weight": torch.ones(8),
        "cos": torch.zeros(4, 8),
        "sin": torch.zeros(4, 8),
        "norm": "layer",
        "eps": EPS,
    }
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(**{**inputs, **changed})


@pytest.mark.thorough
def test_sm90(sm90: Callable[[str], list[dict[str, Any]]]) -> None:
    cases = sm90("qk_norm_rope")
    assert len(cases) == 9
    for case in cases:
        assert case["spills"] == 0, case
        assert case["registers"] <= 128, case
        narrow = [n for n in case["loads"] if n < 16]
        assert all(n == 4 for n in narrow), case  # rstd, one number a head
        # Triton 3.6 loads it once an element of a thread: 4 bytes that are in L1 by then.
        assert len(narrow) <= (2 if version("triton") >= "3.7" else 8), case
        assert case["stores"].count(16) >= 2, case
