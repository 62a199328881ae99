"""The probe names the first op and the innermost module to go wrong, and nothing where nothing is."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dit_lora.guard.probe import BadOp, OpTrace, Probe

Op = Callable[..., torch.Tensor]


class Calls(nn.Module):
    """A module that is one function, and maybe modules that the function calls."""

    def __init__(self, function: Op, **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


class BadBackward(torch.autograd.Function):
    """Right in the forward; its gradient is not finite."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 1.5

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 0


class Checkpointed(nn.Module):
    """Recomputes its inner module in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, values, use_reentrant=False)


def chain(middle: nn.Module) -> nn.Module:
    """linear -> middle -> linear, 5 wide, each with a name."""
    torch.manual_seed(3)
    named_modules = [("first", nn.Linear(5, 5)), ("middle", middle), ("last", nn.Linear(5, 5))]
    return nn.Sequential(OrderedDict(named_modules))


def rows(*shape: int, seed: int = 8, **kwargs: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(**kwargs)


def traced(model: nn.Module, *args: torch.Tensor, loss: Op = torch.Tensor.sum) -> OpTrace:
    with Probe(model).observe_model_ops() as trace:
        loss(model(*args)).float().backward()
    return trace


def assert_backward(trace: OpTrace, module: str) -> None:
    assert trace.first_bad_op is not None
    origin = (trace.first_bad_op.module, trace.first_bad_op.direction, trace.first_bad_op.op)
    assert origin == (module, "backward", "aten.div.Tensor")


def blow_up(values: torch.Tensor) -> torch.Tensor:
    return values * 1e30 * 1e30


def test_an_fp16_matmul_that_overflows_is_named_with_its_module() -> None:
    model = chain(nn.Linear(5, 5)).half()
    with torch.no_grad():
        model.middle.weight.fill_(3e4)
    trace = traced(model, rows(3, 5, dtype=torch.float16))
    assert trace.first_bad_op == BadOp("aten.addmm.default", "middle", "forward", "float16", "inf")
    assert not trace.bad_inputs


def test_a_backward_that_fails_alone_is_named_with_the_module_of_its_forward() -> None:
    trace = traced(chain(Calls(BadBackward.apply)), rows(3, 5))
    assert_backward(trace, "middle")
    assert not trace.hidden_origins
    directions = [step.direction for step in trace.trail]
    assert directions == sorted(directions, reverse=True)
    assert {*directions} == {"forward", "backward"}


@pytest.mark.parametrize(("top", "kind"), [(1.0, "inf"), (0.0, "nan")])
def test_a_division_by_zero_in_the_loss_is_outside_the_model(top: float, kind: str) -> None:
    trace = traced(chain(nn.GELU()), rows(3, 5), loss=lambda output: top * output.square().mean() / 0)
    assert trace.first_bad_op == BadOp("aten.div.Tensor", "", "forward", "float32", kind)
    assert trace.trail[-1].name == "aten.mul.Tensor"


def test_a_backward_of_the_loss_is_outside_the_model() -> None:
    trace = traced(chain(nn.GELU()), rows(3, 5), loss=lambda output: BadBackward.apply(output).mean())
    assert_backward(trace, "")


@pytest.mark.parametrize("where", ["middle", "middle.inner"])
def test_what_a_clamp_hides_in_its_module_is_hidden_and_not_the_origin(where: str) -> None:
    inner = Calls(blow_up)
    grow = blow_up if where == "middle" else inner
    trace = traced(chain(Calls(lambda values: grow(values).clamp(-2, 2), inner=inner)), rows(3, 5))
    assert not trace.origins
    assert trace.hidden_origins == [BadOp("aten.mul.Tensor", where, "forward", "float32", "inf")]


def test_what_one_module_hides_does_not_hide_what_another_spoils() -> None:
    hide = Calls(lambda values: blow_up(values).clamp(-2, 2))
    spoil = Calls(lambda values: (values - 9).log())
    spoil_and_hide = Calls(lambda values: spoil(values) + hide(values), spoil=spoil, hide=hide)
    trace = traced(chain(spoil_and_hide), rows(3, 5))
    assert trace.hidden_origins == [BadOp("aten.mul.Tensor", "middle.hide", "forward", "float32", "inf")]
    assert (trace.origins[0].op, trace.origins[0].module) == ("aten.log.default", "middle.spoil")


def mask_of(kind: str) -> torch.Tensor:
    """(3, 1, 5, 5): every query sees a key, and not every key."""
    causal_mask = torch.ones(3, 1, 5, 5, dtype=torch.bool).tril()
    causal_mask[1, ..., 3:] = False
    return causal_mask if kind == "bool" else torch.zeros(3, 1, 5, 5).masked_fill(~causal_mask, -torch.inf)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_minus_infinity_are_no_origin_in_scaled_dot_product_attention(kind: str) -> None:
    def attend(values: torch.Tensor) -> torch.Tensor:
        heads = values.view(3, 5, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask_of(kind))

    model = nn.Sequential(nn.Linear(8, 8), Calls(attend))
    trace = traced(model, rows(3, 5, 8), loss=lambda output: output.square().sum())
    assert (trace.origins, trace.hidden_origins) == ([], [])


MASKED: dict[str, Op] = {
    "added": lambda scores: scores + mask_of("float")[:, 0],
    "filled": lambda scores: scores.masked_fill(~mask_of("bool")[:, 0], -torch.inf),
    "in place": lambda scores: scores.clone().masked_fill_(~mask_of("bool")[:, 0], -torch.inf),
    "where": lambda scores: torch.where(mask_of("bool")[:, 0], scores, torch.tensor(-torch.inf)),
    "NaN": lambda s: s.masked_fill(~mask_of("bool")[:, 0], torch.nan).nan_to_num(-torch.inf),
    "triangle": lambda scores: scores + torch.full((5, 5), -torch.inf).triu(1),
}


@pytest.mark.parametrize("way", MASKED)
def test_masks_of_minus_infinity_are_no_origin_however_they_are_made(way: str) -> None:
    attend = Calls(lambda values: MASKED[way](values @ values.mT).softmax(-1) @ values)
    trace = traced(chain(attend), rows(3, 5, 5), loss=lambda output: output.square().sum())
    assert (trace.origins, trace.hidden_origins) == ([], [])


def test_a_row_that_is_masked_whole_is_named_at_its_softmax() -> None:
    def attend(values: torch.Tensor) -> torch.Tensor:
        empty = torch.zeros(3, 5, 5).index_fill(0, torch.tensor(1), -torch.inf)
        return (values @ values.mT + empty).softmax(-1) @ values

    trace = traced(chain(Calls(attend)), rows(3, 5, 5))
    softmax = BadOp("aten._softmax.default", "middle", "forward", "float32", "nan")
    assert trace.origins[0] == softmax


def test_a_checkpointed_forward_that_fails_is_named_once_in_the_forward() -> None:
    model = chain(Checkpointed(nn.Sequential(nn.Linear(5, 5), Calls(blow_up))))
    origin = traced(model, rows(3, 5)).origins[0]
    assert origin == BadOp("aten.mul.Tensor", "middle.inner.1", "forward", "float32", "inf")


def test_a_checkpointed_backward_that_fails_is_named_with_its_module() -> None:
    model = chain(Checkpointed(nn.Sequential(nn.Linear(5, 5), Calls(BadBackward.apply), nn.GELU())))
    trace = traced(model, rows(3, 5))
    assert_backward(trace, "middle.inner.1")


def test_what_a_checkpointed_module_hides_stays_hidden_in_its_recomputation() -> None:
    inner = nn.Linear(5, 5)
    block = Calls(lambda values: inner(blow_up(values).clamp(-2, 2)), inner=inner)
    model = chain(Calls(BadBackward.apply))
    model.last = Checkpointed(block)
    trace = traced(model, rows(3, 5))
    assert_backward(trace, "middle")


def test_a_module_that_is_used_twice_is_named_where_it_fails() -> None:
    reused_module = Calls(lambda values: values * 1e25)
    model = Calls(lambda values: reused_module(second_linear(reused_module(values))), twice=reused_module)
    second_linear = nn.Linear(5, 5)
    model.other = second_linear
    trace = traced(model, rows(3, 5))
    assert trace.origins[0] == BadOp("aten.mul.Tensor", "twice", "forward", "float32", "inf")
    assert any(step.name.startswith("other: ") for step in trace.trail)


@pytest.mark.parametrize("bad_use", [0, 1])
def test_a_module_that_is_used_twice_is_named_for_the_backward_of_each_use(bad_use: int) -> None:
    backward_calls = []

    def apply(values: torch.Tensor) -> torch.Tensor:
        backward_calls.append(None)
        return BadBackward.apply(values) if len(backward_calls) - 1 == bad_use else values * 1.2

    reused_module, between = Calls(apply), nn.Linear(5, 5)
    model = Calls(
        lambda values: reused_module(between(reused_module(values))),
        twice=reused_module,
        between=between,
    )
    trace = traced(model, rows(3, 5).requires_grad_())
    assert_backward(trace, "twice")


def test_the_innermost_of_nested_modules_is_named() -> None:
    inner = nn.ModuleList([nn.GELU(), Calls(blow_up)])
    block = Calls(lambda values: inner[1](inner[0](values)) + 0.3, attn=inner)
    trace = traced(chain(nn.Sequential(nn.Identity(), block)), rows(3, 5))
    assert trace.origins[0].module == "middle.1.attn.1"
    assert traced(chain(nn.Sequential(Calls(BadBackward.apply))), rows(3, 5)).origins[0].module == ("middle.0")


def test_an_op_between_inner_modules_belongs_to_the_module_around_them() -> None:
    inner = nn.Linear(5, 5)
    block = Calls(lambda values: inner(blow_up(inner(values))), inner=inner)
    assert traced(chain(block), rows(3, 5)).origins[0].module == "middle"
    block = Calls(lambda values: inner(BadBackward.apply(inner(values))), inner=inner)
    trace = traced(chain(block), rows(3, 5))
    assert_backward(trace, "middle")


class Named(nn.Module):
    """Takes tensors by position, by keyword and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, values: torch.Tensor, *, scale: torch.Tensor, skips: list[torch.Tensor]) -> torch.Tensor:
        return self.linear(values) * scale + sum(skips)


@pytest.mark.parametrize(
    ("given", "value"),
    [("argument 0", torch.nan), ("scale", torch.inf), ("skips", -torch.inf), (None, 0.5)],
)
def test_bad_inputs_of_the_model_are_named_and_no_op_is_blamed(given: str | None, value: float) -> None:
    values, scale, skip = rows(3, 5), rows(3, 1, seed=9), rows(3, 5, seed=10)
    {"argument 0": values, "scale": scale, "skips": skip}.get(given or "", values)[1, 0] = value
    model = Named()
    with Probe(model).observe_model_ops() as trace:
        model(values, scale=scale, skips=[skip, rows(3, 5, seed=11)])
    assert list(trace.bad_inputs) == ([given] if given else [])
    assert trace.origins == []
    if given:
        kind = "NaN" if value != value else "Inf"
        count = 3 if given == "scale" else 15
        assert trace.bad_inputs[given] == f"{given} has 1 {kind} among {count} values"


def test_an_infinite_input_is_no_origin_but_the_nan_that_an_op_makes_of_it_is() -> None:
    values = rows(3, 5)
    values[2, 3] = torch.inf
    trace = traced(Calls(lambda inputs: (inputs * 1.2 - inputs).requires_grad_()), values)
    assert list(trace.bad_inputs) == ["argument 0"]
    assert [(o.op, o.kind) for o in trace.origins] == [("aten.sub.Tensor", "nan")]


def test_an_op_in_place_is_named_and_not_blamed_for_what_was_there() -> None:
    def scale(values: torch.Tensor) -> torch.Tensor:
        return values.clone().mul_(1e30).mul_(1e30).add_(0.3).neg_()

    trace = traced(chain(Calls(scale)), rows(3, 5))
    assert trace.origins[0] == BadOp("aten.mul_.Tensor", "middle", "forward", "float32", "inf")
    forward = [o for o in trace.origins if o.direction == "forward" and o.module == "middle"]
    assert len(forward) == 1


def test_memory_that_nothing_was_written_to_is_no_origin() -> None:
    """Deterministic algorithms fill such memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()

        def assemble(values: torch.Tensor) -> torch.Tensor:
            parts = torch.empty(3, 10)
            parts[:, :5].copy_(values)
            parts[:, 5:] = values.detach() * 0.3
            noise = torch.empty_like(values).normal_() + values.new_empty(5).fill_(0.2)
            return parts[:, :5] + parts[:, 5:] + noise + values.new_empty(5).zero_()

        trace = traced(chain(Calls(assemble)), rows(3, 5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (trace.origins, trace.hidden_origins) == ([], [])


def test_a_cast_into_new_memory_that_overflows_is_named() -> None:
    """Independent of the previous contents of that memory."""
    nan_input = torch.full((3, 5), torch.nan, dtype=torch.float16)
    with Probe(nn.Identity()).observe_model_ops() as trace:
        nan_input.copy_(rows(3, 5) * 1e30)
    assert [o.op for o in trace.origins] == ["aten.copy_.default"]


def test_the_trail_is_in_order_and_says_how_much_room_was_left() -> None:
    values = torch.tensor([[3.0, -7.0], [0.5, 2.0], [1.0, -0.25]], dtype=torch.float16)
    grow = Calls(lambda inputs: inputs * 100 * 80, inner=nn.Identity())
    shift = Calls(lambda inputs: -inputs + 2)
    model = nn.Sequential(OrderedDict(grow=grow, shift=shift, end=Calls(lambda inputs: inputs * 3.0)))
    with Probe(model).observe_model_ops() as trace:
        model(values)
    assert trace.origins == [BadOp("aten.mul.Tensor", "end", "forward", "float16", "inf")]
    assert [(s.name, s.peak) for s in trace.trail] == [
        ("grow: aten.mul.Tensor", 700.0),
        ("grow: aten.mul.Tensor", 56000.0),
        ("shift: aten.neg.default", 56000.0),
        ("shift: aten.add.Tensor", 56000.0),
    ]
    assert [s.headroom for s in trace.trail] == [65504 / s.peak for s in trace.trail]
    assert {(s.direction, s.dtype) for s in trace.trail} == {("forward", "float16")}


def test_the_trail_ends_at_the_first_origin_and_is_twelve_long() -> None:
    """Of an op with two outputs the larger counts."""
    values = torch.tensor([1.0, -0.5])
    with Probe(nn.Identity()).observe_model_ops() as trace:
        for _ in range(20):
            values = values * 10
        torch.aminmax(values)
        values * 1e30 * 1e-30
    expected = [*(10.0**n for n in range(10, 21)), 1e20]
    assert [s.peak for s in trace.trail] == pytest.approx(expected)


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called)
        for m in model.modules()
    )


def test_hooks_and_mode_are_gone_afterwards_and_after_a_run_that_raises() -> None:
    def fail(values: torch.Tensor) -> torch.Tensor:
        blow_up(values)
        raise RuntimeError("out of memory")

    model = chain(Checkpointed(nn.Linear(5, 5)))
    with Probe(model).observe_model_ops() as trace:
        assert hooks_of(model)
        model(rows(3, 5)).sum().backward()
    assert hooks_of(model) == 0
    model.middle = Calls(fail)
    with pytest.raises(RuntimeError, match="out of memory"), Probe(model).observe_model_ops() as other_probe:
        model(rows(3, 5))
    assert hooks_of(model) == 0
    blow_up(rows(3, 5))
    assert (trace.origins, trace.hidden_origins, trace.bad_inputs) == ([], [], {})
    assert [(o.module, o.op) for o in other_probe.origins] == [("middle", "aten.mul.Tensor")]


def test_a_probed_run_computes_the_same_bits() -> None:
    gradients = []
    for watched in (False, True):
        torch.manual_seed(6)
        model = chain(Checkpointed(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.4))))
        if watched:
            traced(model, rows(3, 5), loss=lambda output: output.square().mean())
        else:
            model(rows(3, 5)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_healthy_run_with_integers_and_empty_tensors_has_no_origin() -> None:
    table = nn.Embedding(11, 5)
    model = Calls(lambda ids: table(ids) + torch.cat([table(ids)[:, :0], table(ids)], 1), table=table)
    trace = traced(model, torch.tensor([[1, 10, 4], [7, 0, 0]]))
    assert (trace.origins, trace.hidden_origins, trace.bad_inputs) == ([], [], {})


def test_nan_that_a_complex_op_makes_is_seen() -> None:
    rotate = Calls(lambda values: torch.view_as_real(torch.view_as_complex(values) / 0))
    with Probe(rotate).observe_model_ops() as trace:
        rotate(rows(3, 4, 2))
    assert trace.first_bad_op is not None
