"""LoRA layers of real PEFT models through lora_linear: the same model after every change of its adapters."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from kernel_checks import relative_error
from lora_layers import BF16, PATCH, Attention, assert_close, build, counted, fused, inputs, step
from torch import Tensor, nn

from dit_lora.fuse import lora
from dit_lora.fuse.patches import FusedModelState, patch_forward


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("shared", [False, True])
def test_the_same_model(shared: bool, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = build(lora_dropout=dropout, rank_pattern={"k": 3}, alpha_pattern={"v": 1})
    model = copy.deepcopy(stock)
    model.shared, stock.shared = shared, False
    fusion, x = fused(model), inputs()
    assert [name for _, name in fusion.patched_modules] == ["q", "k", "v", "out"]
    with counted(monkeypatch) as calls:
        ours = step(model, x)
    assert calls == ([3, 1] if shared else [1] * 4)
    assert_close(ours, step(stock, x))
    assert_close(step(model.eval(), x), step(stock.eval(), x))
    fusion.op_states[lora.OP] = False
    with counted(monkeypatch) as calls:
        assert all(map(torch.equal, step(model.train(), x), step(stock.train(), x)))
    assert calls == []


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_no_worse_than_peft_under_autocast(autocast: bool) -> None:
    """Errors from fp64 of the whole model's output and gradients, over twelve models."""
    errors = []
    for seed in range(12):
        exact, stock = build(seed=seed).double(), build(BF16, seed=seed)
        exact.load_state_dict(stock.state_dict())
        model = copy.deepcopy(stock)
        fused(model)
        with torch.autocast("cpu", BF16):
            theirs = step(stock, inputs(BF16))
        with torch.autocast("cpu", BF16, enabled=autocast):
            ours = step(model, inputs(BF16))
        trues = step(exact, inputs(BF16).detach().double().requires_grad_())
        assert [t.dtype for t in ours] == [t.dtype for t in theirs] == [BF16] * 2 + [torch.float32] * 8
        errors.append(
            [[relative_error(t, true) for t in both] for *both, true in zip(ours, theirs, trues, strict=True)]
        )
    mine, stock_errors = torch.tensor(errors).square().mean(0).sqrt().unbind(1)
    assert (mine <= 1.1 * stock_errors).all(), mine / stock_errors


def dora() -> Attention:
    return build(use_dora=True)


def two_adapters() -> Attention:
    model = build()
    other_config = peft.LoraConfig(r=2, target_modules=["q", "k", "v", "out"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's: that there is one already
        peft.inject_adapter_in_model(other_config, model, "other")
    for layer in (model.q, model.k, model.v, model.out):
        layer.set_adapter("default")
    return model


def both_active() -> Attention:
    model = two_adapters()
    model.q.set_adapter(["default", "other"])
    return model


def changed(change: Callable[[Attention], object], **config: Any) -> Callable[[], Attention]:
    def make() -> Attention:
        model = build(**config)
        change(model)
        return model

    return make


def wrap_forward(layer: nn.Module) -> None:
    layer.forward = layer.forward  # as accelerate's and Diffusers' offload do


class Doubled(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Tagged(Tensor):
    """A tensor of another library."""


def tag(layer: nn.Module, name: str = "weight") -> None:
    setattr(layer, name, nn.Parameter(getattr(layer, name).detach().as_subclass(Tagged), False))


def double_base(m: Attention) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    m.q.base_layer.__class__ = Twice


def hook(layer: nn.Module) -> object:
    return layer.register_forward_hook(lambda _m, _a, y: 2 * y)


REASONS: list[tuple[str, Callable[[], Attention]]] = [
    ("its adapters are disabled", changed(lambda m: m.q.enable_adapters(False))),
    ("its adapter is merged", changed(lambda m: m.q.merge())),
    ("2 active adapters", both_active),
    ("0 active adapters", changed(lambda m: m.q.set_adapter([]))),
    ("its adapter is DoRA or another variant", dora),
    ("its A or B is more than a matrix", changed(lambda m: None, lora_bias=True)),
    ("its base is a Twice", changed(double_base)),
    (
        "its dropout is a Doubled",
        changed(lambda m: m.q.lora_dropout.update({"default": Doubled()})),
    ),
    ("its dropout drops everything", changed(lambda m: None, lora_dropout=1.0)),
    ("hooks on its base, A, B or dropout", changed(lambda m: hook(m.q.base_layer))),
    ("hooks on its base, A, B or dropout", changed(lambda m: hook(m.q.lora_A["default"]))),
    ("hooks on its base, A, B or dropout", changed(lambda m: hook(m.q.lora_B["default"]))),
    (
        "hooks on its base, A, B or dropout",
        changed(lambda m: hook(m.q.lora_dropout["default"]), lora_dropout=0.1),
    ),
    (
        "hooks on its base, A, B or dropout",
        changed(lambda m: m.q.base_layer.register_forward_pre_hook(lambda _m, a: (3 * a[0],))),
    ),
    (
        "hooks on its base, A, B or dropout",
        changed(lambda m: m.q.base_layer.register_full_backward_hook(lambda _m, dx, _dy: (2 * dx[0],))),
    ),
    (
        "hooks on its base, A, B or dropout",
        changed(lambda m: m.q.lora_A["default"].register_full_backward_pre_hook(lambda _m, dy: (2 * dy[0],))),
    ),
    ("hooks on its base, A, B or dropout", changed(lambda m: wrap_forward(m.q.base_layer))),
    ("its base is trained", changed(lambda m: m.q.base_layer.weight.requires_grad_())),
    ("its base is trained", changed(lambda m: m.q.base_layer.bias.requires_grad_())),
    ("its A or B is no plain tensor", changed(lambda m: tag(m.q.lora_B["default"]))),
    ("its bias is no plain tensor", changed(lambda m: tag(m.q.base_layer, "bias"))),
    ("its base weight is sharded, or no plain tensor", changed(lambda m: tag(m.q.base_layer))),
]


@pytest.mark.parametrize(("reason", "make"), REASONS)
def test_what_is_not_the_plain_case_runs_pefts_own_forward(
    reason: str, make: Callable[[], Attention], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a single layer and as one of three; the other layers are fused as before."""
    model = make()
    model.shared = False
    assert lora.find_lora_problem(model.q) == reason
    theirs = step(model, inputs())
    fusion = FusedModelState({lora.OP: True})
    for name in ("q", "k", "v"):  # as if it had been the plain case when the model was fused
        always = PATCH.__class__(PATCH.target_class, PATCH.op, PATCH.forward)
        patch_forward(name, getattr(model, name), fusion, always)
    for model.shared in (False, True):
        with counted(monkeypatch) as calls:
            assert_close(step(model, inputs()), theirs)
        assert 3 not in calls


def test_reasons_that_no_forward_survives() -> None:
    """Shards of ZeRO-3, storage in fp8, a transposed base: their own code has to run around the layer."""
    q = build().q
    q.base_layer.weight.data = torch.empty(0)
    assert lora.find_lora_problem(q) == "its base weight is sharded, or no plain tensor"
    q = build().q
    q.lora_A["default"].weight.data = torch.empty(0)
    assert lora.find_lora_problem(q) == "its A or B is sharded"
    q = build().q
    q.base_layer.to(torch.float8_e4m3fn)
    assert lora.find_lora_problem(q) == "its base weight is in torch.float8_e4m3fn"
    q = build().q
    q.fan_in_fan_out = True
    assert lora.find_lora_problem(q) == "its base weight is transposed"
    assert lora.find_lora_problem(nn.Linear(2, 2)) == "not one of PEFT's LoRA linear layers"


def test_adapters_may_change_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged, unmerged, disabled, enabled, switched, scaled, given per sample, hooked: as PEFT has it."""
    model, x = two_adapters(), inputs()
    stock = copy.deepcopy(model)
    stock.shared = False
    fused(model)
    changes: list[tuple[Callable[[Any], object], bool]] = [
        (lambda q: q.merge(), False),
        (lambda q: q.unmerge(), True),
        (lambda q: q.enable_adapters(False), False),
        (lambda q: q.enable_adapters(True), True),
        (lambda q: q.set_adapter("other"), True),
        (lambda q: q.set_scale("other", 3.0), True),
        (lambda q: q.set_adapter("default"), True),
        (lambda q: q.scale_layer(0.5), True),
    ]
    for change, exact in changes:
        change(model.q)
        change(stock.q)
        with counted(monkeypatch) as calls:
            assert_close(step(model, x), step(stock, x))
        assert (3 in calls) is exact
    names = ["default", "other"]
    torch.testing.assert_close(model.q(x, adapter_names=names), stock.q(x, adapter_names=names))


def test_hooks_on_the_layer_itself_are_called() -> None:
    model, x = build(), inputs()
    fused(model)
    plain = model(x)
    recorded: list[Tensor] = []
    handle = model.k.register_forward_hook(lambda _m, _a, y: recorded.append(y.detach()))
    assert torch.equal(model(x), plain)  # statistics of a run change no bit of it
    assert len(recorded) == 1
    handle.remove()
    with model.k.register_forward_pre_hook(lambda _m, args: (2 * args[0],)):
        assert torch.equal(lora.project_linear_layers((model.q, model.k), x)[1], model.k(x))
    assert not [m for m in (model.q, model.k, model.v) if lora._OUTPUT_ATTRIBUTE in vars(m)]
    calls: list[int] = []
    forward = model.v.forward
    model.v.forward = lambda *args: (calls.append(1), forward(*args))[1]  # offload, added later
    torch.testing.assert_close(model(x), plain)
    assert calls == [1]


def test_project_calls_what_is_not_lora() -> None:
    model, x = build(target_modules=["q", "v"]), inputs()
    stock = copy.deepcopy(model)
    fused(model)
    stock.shared = False
    assert_close(step(model, x), step(stock, x))
    (projected,) = lora.project_linear_layers((model.q,), x)
    torch.testing.assert_close(projected, stock.q(x))
