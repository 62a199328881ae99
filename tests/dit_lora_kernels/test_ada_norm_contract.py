"""`ada_norm`: hard values, offsets, memory, compilation, refusals, and what ptxas makes of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ada_norm_cases import (
    CASE,
    CASES,
    DEVICE,
    EPS,
    Case,
    assert_same,
    cotangents,
    eager,
    joint,
    make,
    ours,
    results,
)
from kernel_checks import (
    relative_error,
    saved_bytes,
)

from dit_lora_kernels import ada_norm as op
from dit_lora_kernels import ada_norm_kernels
from dit_lora_kernels.ada_norm import AdaNormInputs, joint_ada_norm

pytestmark = pytest.mark.usefixtures("several_rows_a_program")


HARD = {
    "far from zero": lambda x: 100 + x,
    "constant": lambda x: x * 0 + 3,
    "zero": lambda x: x * 0,
    "large": lambda x: 1e4 + x,
    "tiny": lambda x: x * 1e-20,
}


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(("what", "dtype"), [*((k, torch.float32) for k in HARD), ("large", torch.float16)])
def test_hard_values(what: str, norm: str, dtype: torch.dtype) -> None:
    tensors = make(Case(norm, (2, 5, 72), without="y gate"), dtype)
    tensors["x"] = HARD[what](tensors["x"].detach()).requires_grad_()
    exact_inputs = {k: v.detach().double().requires_grad_() for k, v in tensors.items()}
    exact, stock = results(eager, norm, exact_inputs), results(eager, norm, tensors)
    for name, value in results(ours, norm, tensors).items():
        assert torch.isfinite(value).all(), name
        # Both round the mean to its dtype: noise as large as the error that it leaves.
        allowed = 2 * relative_error(stock[name], exact[name]) + torch.finfo(dtype).eps * 8
        assert relative_error(value, exact[name]) <= allowed, name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_bad_row_stays_in_its_row(bad: float, norm: str) -> None:
    tensors = make(Case(norm, (2, 7, 40), without="shift scale weight bias gate"))
    clean = results(ours, norm, tensors)
    tensors["x"] = tensors["x"].detach().clone()
    tensors["x"][1, 5, 3] = bad
    tensors["x"].requires_grad_()
    for name, value in results(ours, norm, tensors).items():
        reached = torch.ones(2, 7, dtype=torch.bool, device=DEVICE)
        reached[1, 5] = False
        assert not torch.isfinite(value[1, 5]).all()
        assert torch.equal(value[reached], clean[name][reached])


def test_a_gate_of_zero_passes_x() -> None:
    tensors = make(CASE)
    tensors["gate"] = torch.zeros_like(tensors["gate"])
    actual = results(ours, "layer", tensors)
    assert torch.equal(actual["residual"], tensors["x"])
    assert not actual["d_y"].any()


def test_repeats_to_the_bit() -> None:
    case = Case("layer", (3, 33, 72))
    assert_same(results(ours, "layer", make(case)), results(ours, "layer", make(case)))


def test_autocast_changes_nothing() -> None:
    expected = results(ours, "layer", make(CASE))
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_same(results(ours, "layer", make(CASE)), expected)


def test_offsets_beyond_two_to_the_31() -> None:
    """Rows of the third sample lie past 2**31 elements of memory that is only reserved."""
    stride, (B, T, D) = 2**30, (3, 2, 16)
    tensors = make(Case("layer", (B, T, D)), torch.bfloat16)
    far = {}
    for name in ("x", "y", "out", "grad", "grad_residual"):
        far[name] = torch.empty(2 * stride + T * D, dtype=torch.bfloat16, device=DEVICE)
        far[name] = far[name].as_strided((B, T, D), (stride, D, 1))
    for name in ("x", "y"):
        far[name].copy_(tensors[name].detach())
    plain = {k: v.detach() for k, v in tensors.items()}
    stream = AdaNormInputs(far["x"], plain["shift"], plain["scale"], far["y"], plain["gate"])
    residual, stats = torch.empty_like(plain["x"]), torch.empty(2, B, stride // D, device=DEVICE)
    affine = plain["weight"], plain["bias"]
    op.launch_forward(stream, *affine, residual, far["out"], stats[..., :T], EPS)
    expected = results(ours, "layer", tensors)
    assert torch.equal(far["out"], expected["out"])
    weights = cotangents((plain["x"], plain["x"]))
    far["grad"].copy_(weights[0])
    far["grad_residual"].copy_(weights[1])
    operands = op.BackwardOperands(
        far["grad"], far["grad_residual"], far["x"].copy_(residual), stats[..., :T], far["y"],
        plain["gate"], plain["scale"], plain["weight"],
    )  # fmt: skip
    dx, dy = torch.empty_like(residual), torch.empty_like(residual)
    *_, dgate = op.launch_backward(operands, (dx, dy), 1, [True, True, True])
    assert dgate is not None
    actual = {"d_x": dx, "d_y": dy, "d_gate": dgate.bfloat16()}
    assert_same(actual, {k: expected[k] for k in actual})


PLANNED = {
    "affine": (CASE, {}),
    "plain": (Case("layer", (2, 5, 72), without="weight bias"), {}),
    "rms, a row a token": (Case("rms", (2, 4, 64), 4, "bias"), {}),
    "no y": (Case("layer", (3, 6, 64), 3, "y gate"), {}),
    "no gate": (Case("layer", (2, 5, 40), without="gate weight bias"), {}),
    "tables (B,D)": (CASE, dict.fromkeys(("shift", "scale", "gate"), lambda v: v[:, 0])),
    "strided": (CASE, {"x": lambda v: v.transpose(0, 1).contiguous().transpose(0, 1),
                       "y": lambda v: torch.cat([v, v], -1)[..., :40],
                       "gate": lambda v: torch.cat([v, v], 1)[:, 1:]}),
    "dtypes": (CASE, {"x": torch.Tensor.bfloat16, "y": torch.Tensor.bfloat16, "gate": torch.Tensor.half}),
    "low, a program a group": (Case("layer", (2, 4, 40)),
                               dict.fromkeys(("x", "y", "shift", "scale", "gate"), torch.Tensor.bfloat16)),
    "low": (CASE, dict.fromkeys(("x", "y", "shift", "scale", "gate"), torch.Tensor.bfloat16)),
}  # fmt: skip
"""What a plan takes: frozen weights, and operands as kernels read them."""


@pytest.mark.parametrize("programs", [1, 512], ids=["chunks", "a program a row"])
@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_comes_to_the_same_bits(name: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once by the ops, twice by a plan: made, and found again."""
    monkeypatch.setattr(ada_norm_kernels, "MIN_PROGRAMS", programs)
    op._build_backward_plan.cache_clear()
    case, changes = PLANNED[name]
    tensors = {k: v.detach() for k, v in make(case).items()}
    tensors |= {k: change(tensors[k]) for k, change in changes.items()}
    for key in tensors.keys() - {"weight", "bias"}:
        tensors[key].requires_grad_()
    planned: list[object] = []
    plan_of = op._find_plan

    def noted(*args: Any) -> Any:
        planned.append(plan_of(*args))
        return planned[-1]

    monkeypatch.setattr(op, "_find_plan", noted)
    first_run, mismatched = (results(ours, case.norm, tensors) for _ in range(2))
    monkeypatch.setattr(op, "_find_plan", lambda *_: None)
    assert_same(first_run, results(ours, case.norm, tensors))
    assert_same(mismatched, first_run)
    assert planned[0] is not None
    assert planned[0] is planned[1]


def test_a_joint_plan_comes_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    video, text = (make(CASE), make(Case("layer", (2, 3, 40), without="weight bias y gate")))
    affine = {k: video[k].detach() for k in ("weight", "bias")}

    def run(_: str, **leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        text_leaves = {k.removeprefix("text "): v for k, v in leaves.items() if k.startswith("text ")}
        video_leaves = {k: v for k, v in leaves.items() if not k.startswith("text ")}
        return joint(video_leaves | affine, text_leaves)

    leaves = {k: v for k, v in video.items() if k not in affine}
    leaves |= {f"text {k}": v for k, v in text.items()}
    results_by_plan = []
    for plan in (op._find_plan, lambda *_: None):
        monkeypatch.setattr(op, "_find_plan", plan)
        outputs = run("", **leaves)
        grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents(outputs))
        results_by_plan.append(dict(enumerate((*outputs, *grads))))
    assert_same(*results_by_plan)


@pytest.mark.parametrize("used", ["out", "residual"])
def test_a_plan_where_one_output_is_not_used(used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make(Case("layer", (2, 5, 72), without="weight bias"))
    outputs = []
    for plan in (op._find_plan, lambda *_: None):
        monkeypatch.setattr(op, "_find_plan", plan)
        output = ours("layer", **tensors)[used == "residual"]
        inputs = [tensors[k] for k in ("x", "y", "gate")]
        grads = torch.autograd.grad(output, inputs, cotangents((output,)))
        outputs.append(dict(enumerate(grads)))
    assert_same(*outputs)


def no_plan(norm: str = "layer", **changes: torch.Tensor) -> bool:
    """Whether the operands, some of them changed, have no plan."""
    tensors = {k: v.detach() for k, v in make(CASE).items()} | changes
    x = AdaNormInputs(**{k: tensors[k] for k in AdaNormInputs._fields})
    return op._find_plan(norm, EPS, tensors["weight"], tensors["bias"], list(x)) is None


def test_no_plan_for_what_needs_a_copy_or_is_looked_at() -> None:
    assert not no_plan()
    bad_tensor = torch.randn(2, 3, 40, device=DEVICE)  # three groups do not divide seven tokens
    assert no_plan(gate=bad_tensor)
    assert no_plan("batch")
    assert no_plan(x=torch.randn(2, 40, 7, device=DEVICE).transpose(1, 2))
    assert no_plan(gate=torch.randn(2, 40, device=DEVICE))  # another shape than the other tables
    assert no_plan(shift=torch.randn(2, 7, 40, device=DEVICE))  # a row a token, beside a row a sample
    assert no_plan(shift=torch.randn(2, 1, 80, device=DEVICE)[..., ::2])
    assert no_plan(y=torch.empty(2, 7, 40, device="meta"))
    assert no_plan(bias=torch.zeros(40, device=DEVICE, requires_grad=True))
    assert no_plan(x=torch.empty(2, 0, 40, device=DEVICE), y=torch.empty(2, 0, 40, device=DEVICE))
    with torch.profiler.profile():
        assert no_plan()
    with torch.autograd.profiler.record_function("a name"):
        assert not no_plan()


def test_rows_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ada_norm_kernels, "MIN_PROGRAMS", 512)
    assert [
        ada_norm_kernels.compute_rows_per_program(*v) for v in ((17_550, 17_550), (512, 512), (9, 9), (70_200, 1))
    ] == [32, 1, 1, 1]
    assert ada_norm_kernels.compute_rows_per_program(17_550, 13) == 8
    assert ada_norm_kernels.compute_rows_per_program(0, 0) == 1


@pytest.mark.parametrize("kernel", [True, False])
def test_opcheck(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        monkeypatch.setattr(op, "launches", lambda tensor: False)
    t = {k: v.detach() for k, v in make(CASE).items()}
    text = [t["x"][:, :3], None, t["scale"], None, None]
    flat = [*text, *(t[k] for k in AdaNormInputs._fields)]
    torch.library.opcheck(op.ada_norm_forward.library, (flat, t["weight"], t["bias"], True, EPS))
    _, stats, residual = op.ada_norm_forward(flat, t["weight"], t["bias"], True, EPS)
    saved_inputs = [
        t["x"],
        t["y"],
        residual,
        stats[..., 3:],
        t["y"],
        t["gate"],
        t["scale"],
        t["weight"],
    ]
    for needs_grad in (
        (True, torch.bfloat16, [True, True, True]),
        (True, None, [False, True, False]),
    ):
        torch.library.opcheck(op.ada_norm_backward.library, (saved_inputs, 1, *needs_grad))


def test_saved_bytes() -> None:
    """x' plus mean and rstd per row, and nothing for a row without y; eager keeps the normalised rows too."""
    B, T, D = shape = (2, 7, 1152)
    full, minimal = (
        make(Case("layer", shape), torch.bfloat16),
        make(Case("rms", shape, without="y gate"), torch.bfloat16),
    )
    rows, stats = B * T * D * 2, B * T * 4
    saved = [saved_bytes(lambda run=run: run("layer", **full), [*full.values()]) for run in (ours, eager)]
    assert saved[0] == rows + 2 * stats
    assert saved[1] >= saved[0] + rows
    assert saved_bytes(lambda: ours("rms", **minimal), [*minimal.values()]) == stats
    full["gate"] = full["gate"].detach()  # then y is not needed either
    assert saved_bytes(lambda: ours("layer", **full), [v for k, v in full.items() if k != "y"]) == rows + 2 * stats


def test_compiles_without_a_break() -> None:
    tensors, text = make(CASE), make(Case("layer", (2, 3, 40), without="weight bias y gate"))
    leaves = [*tensors.values(), *text.values()]
    compiled = torch.compile(joint, fullgraph=True, backend="aot_eager")
    actual = [
        (outputs, torch.autograd.grad(outputs, leaves, cotangents(outputs)))
        for outputs in (joint(tensors, text), compiled(tensors, text))
    ]
    for value, expected_value in zip(*([*outputs, *grads] for outputs, grads in actual), strict=True):
        assert torch.equal(value, expected_value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "batch"}, "norm must be 'layer' or 'rms'; got 'batch'"),
        ({"x": torch.zeros(7, 40)}, r"x of stream 0 must be floating-point \(B, T, D\)"),
        ({"x": torch.zeros(2, 7, 40, dtype=torch.int32)}, "must be floating-point"),
        (
            {"y": torch.zeros(2, 6, 40)},
            r"y of stream 0 must have the shape of x, \(2, 7, 40\); got \(2, 6, 40\)",
        ),
        ({"y": None}, "gate of stream 0 needs y, which is None"),
        ({"shift": torch.zeros(2, 3, 40)}, "shift of stream 0 must be .* divide T=7 .*; got"),
        ({"scale": torch.zeros(1, 40)}, "scale of stream 0"),
        ({"gate": torch.zeros(2, 2, 7, 40)}, "gate of stream 0"),
        ({"weight": torch.zeros(1)}, r"weight must be \(40,\); got \(1,\)"),
        ({"bias": torch.zeros(41)}, r"bias must be \(40,\); got \(41,\)"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours(**{"norm": "layer", **make(CASE), **changes})


def test_refuses_streams_that_do_not_go_together() -> None:
    x = torch.zeros(2, 3, 40)
    with pytest.raises(ValueError, match="at least one stream"):
        joint_ada_norm([], norm="rms", eps=EPS)
    for mismatched in (x[:1], x[..., 1:], x.double()):
        with pytest.raises(ValueError, match=r"x of stream 1 must be .* of stream 0"):
            joint_ada_norm([AdaNormInputs(x), AdaNormInputs(mismatched)], norm="rms", eps=EPS)


@pytest.mark.parametrize("shape", [(0, 7, 40), (2, 0, 40)])
def test_empty(shape: tuple[int, int, int]) -> None:
    actual = results(ours, "layer", make(Case("layer", shape)))
    assert actual["out"].shape == actual["d_y"].shape == shape
    assert actual["d_weight"].shape == (40,)
    assert not any(actual[k].any() for k in actual)


@pytest.mark.parametrize("case", [CASE, Case("rms", (2, 6, 40), 3), CASES[2]], ids=str)
def test_agrees_without_the_kernel(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make(case, torch.float64)
    actual = results(ours, case.norm, tensors)
    monkeypatch.setattr(op, "launches", lambda tensor: False)
    for name, value in results(ours, case.norm, tensors).items():
        torch.testing.assert_close(value, actual[name], msg=name)


@pytest.mark.thorough
def test_compiled_for_sm90(sm90: Callable[[str], list[dict[str, Any]]]) -> None:
    """No spills but one (docs/benchmarks/sm90.md); 16 bytes a thread, but for mean and rstd."""
    cases = sm90("ada_norm")
    assert len(cases) == 16
    for case in cases:
        assert case["spills"] <= (16 if case["case"] == "wan backward with tables" else 0), case
        rows = [width for width in case["loads"] + case["stores"] if width != 4]
        if "with tables" in case["case"]:  # rows on their way go past registers, to shared memory
            assert min(case["stores"]) >= 16, case
            continue
        assert set(rows) == {16}, case
        statistics = 1 if "ltx" in case["case"] else 2
        assert len(case["loads"]) + len(case["stores"]) - len(rows) == statistics, case
