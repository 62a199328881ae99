"""LoRA layers through lora_linear at run time: memory, casts, copies, checkpointing, compilation."""

import copy
import io

import pytest
import torch
from kernel_checks import saved_bytes
from lora_layers import BF16, Attention, build, fused, inputs, step
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from dit_lora.fuse import casts, lora
from dit_lora.fuse.patches import get_fusion, set_fusion
from dit_lora_kernels.lora_linear import cast_lora_factors


def test_checkpointing_recomputes_the_same() -> None:
    model, x = build(lora_dropout=0.3), inputs()
    fused(model)
    expected = step(model, x)
    repeated = step(Checkpointed(model), x)
    assert all(map(torch.equal, expected, repeated))


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=False)


def test_saved_bytes_are_half_of_pefts() -> None:
    model, x = build(BF16), inputs(BF16)
    stock = copy.deepcopy(model)
    fused(model)
    stock.shared = False
    outputs = []
    with torch.autocast("cpu", BF16):
        for module in (model, stock):
            module(x)  # casts of the adapters belong to the step, not to a call
            lowered_tensors = [t for cast in casts.CAST_CACHE.values() for t in cast.factors]

            def run(m: Attention = module) -> tuple[Tensor, ...]:
                return lora.project_linear_layers((m.q, m.k, m.v), x)

            outputs.append(saved_bytes(run, besides=[*module.parameters(), *lowered_tensors]))
    ours, theirs = outputs
    assert ours == 18 * 2 * (24 + 3 * 4)
    assert ours < 0.5 * theirs


def test_casts_are_made_once_and_never_missed() -> None:
    """Shared by calls until a parameter is written to, or a forward pass of the model begins."""
    model, x = build(BF16), inputs(BF16)
    fused(model)
    a = model.q.lora_A["default"].weight

    def cast() -> Tensor:
        model.q(x)
        return casts.CAST_CACHE[model.q].factors[0]

    first_cast = cast()
    assert cast() is first_cast
    with torch.no_grad():
        a.mul_(2)
    second = cast()
    assert torch.equal(second, a.bfloat16())
    with torch.no_grad():
        model.q.lora_B["default"].weight.mul_(2)
    third = cast()
    assert third is not second
    a.data.mul_(2)  # no trace
    casts.refresh_lora_casts(model)
    assert torch.equal(cast(), a.bfloat16())
    a.data = a.data.clone()
    assert cast() is not third
    scaled = casts.CAST_CACHE[model.q].factors[1]
    model.q.set_scale("default", 5.0)
    cast()
    assert not torch.equal(casts.CAST_CACHE[model.q].factors[1], scaled)
    for new in (nn.Parameter(torch.randn(4, 24)), nn.Parameter(torch.randn(4, 24))):
        model.q.lora_A["default"].weight = new  # another parameter, of the same version
        assert torch.equal(cast(), new.bfloat16())
    with torch.autocast("cpu", torch.float16):
        assert cast().dtype is torch.float16
    with torch.inference_mode():
        model(x)
    step(model, x)  # nothing of inference mode is saved for it


def test_copies_and_state_dicts_know_nothing_of_casts() -> None:
    model, x = build(BF16), inputs(BF16)
    names = list(model.state_dict())
    fused(model)
    before = step(model, x)
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    assert get_fusion(twin.q) is not None
    with torch.no_grad():
        twin.q.lora_A["default"].weight.zero_()
    assert not torch.equal(twin(x), before[0])
    assert torch.equal(model(x), before[0])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file))
    assert torch.equal(twin(x), before[0])
    del twin, model
    assert not casts.CAST_CACHE or all(layer is not None for layer in casts.CAST_CACHE)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiles_without_a_graph_break(dropout: float) -> None:
    model, x = build(BF16, lora_dropout=dropout), inputs(BF16)
    fused(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, step(compiled, x), step(model, x)))


def test_fake_tensors_are_counted_as_fused() -> None:
    """As the advice on checkpointing counts what a step would save, with fake weights."""
    model, x = build(BF16), inputs(BF16)
    fused(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {name: torch.empty_like(p).requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
        fake_x = torch.empty_like(x).requires_grad_()
    layers = nn.ModuleList([model.q, model.k, model.v])
    shared = Shared(layers)
    fakes = {
        f"layers.{i}.{n}": fakes[f"{k}.{n}"] for i, k in enumerate("qkv") for n, _ in layers[i].named_parameters()
    }
    ledger: list[torch.Size] = []
    with saved_tensors_hooks(lambda t: ledger.append(t.shape) or t, lambda t: t):
        functional_call(shared, fakes, (fake_x,))
    assert ledger.count(x.shape) == 1


class Shared(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return lora.project_linear_layers(list(self.layers), x)


def adapted() -> Attention:
    """A fused model whose casts are made."""
    model = build(BF16)
    set_fusion(model, fused(model))
    model(inputs(BF16))
    return model


def layers_of(model: Attention) -> list[nn.Module]:
    return [model.q, model.k, model.v, model.out]


def test_casts_are_renewed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copies = adapted(), []
    real = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *args: copies.append(1) or real(*args))
    model.k.lora_A["default"].weight.data.mul_(3)  # no trace
    model.v.lora_B["default"].weight.data.mul_(3)
    casts.refresh_lora_casts(model)
    assert len(copies) == 2  # all A, all B
    for layer in layers_of(model):
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        expected = cast_lora_factors(a, b, layer.scaling["default"], BF16)
        assert all(map(torch.equal, casts.CAST_CACHE[layer].factors, expected))
    actual = step(model, inputs(BF16))
    with monkeypatch.context() as patch:
        patch.setattr(casts, "cast_lora_factors", None)  # nobody makes a cast of its own
        assert all(map(torch.equal, step(model, inputs(BF16)), actual))
    casts.CAST_CACHE.clear()
    assert all(map(torch.equal, step(model, inputs(BF16)), actual))


def test_casts_that_no_forward_took_are_not_renewed() -> None:
    model, other_model = adapted(), adapted()
    casts.refresh_lora_casts(model)
    assert set(casts.CAST_CACHE) == set(layers_of(model))  # the other's are forgotten
    model.q(inputs(BF16))
    casts.refresh_lora_casts(model)
    assert set(casts.CAST_CACHE) == {model.q}
    casts.refresh_lora_casts(other_model)
    assert not casts.CAST_CACHE


def test_parameters_that_are_elsewhere_are_not_renewed() -> None:
    """FSDP replaces them between forwards, ZeRO-3 empties them, offload moves them."""
    model, x = adapted(), inputs(BF16)
    expected = step(model, x)
    replaced = model.q.lora_A["default"]
    unsharded, sharded = replaced.weight, nn.Parameter(torch.zeros(1, 24))
    replaced.weight = sharded
    emptied = model.k.lora_B["default"].weight
    storage, emptied.data = emptied.data, torch.empty(0)
    casts.refresh_lora_casts(model)
    assert set(casts.CAST_CACHE) == {model.v, model.out}
    replaced.weight, emptied.data = unsharded, storage
    assert all(map(torch.equal, step(model, x), expected))


def test_a_forward_leaves_the_casts_of_one_before_to_its_backward() -> None:
    model, x = adapted(), inputs(BF16)
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = step(model, x)[2:]
    first_output = model(x)
    casts.refresh_lora_casts(model)
    model(x)
    grads = torch.autograd.grad(first_output.float().square().sum(), trained)
    assert all(map(torch.equal, grads, expected))


def test_layers_without_hooks_are_not_called_and_hooks_see_every_call() -> None:
    model, x = adapted(), inputs(BF16)
    recorded: list[Tensor] = []
    expected = lora.project_linear_layers((model.q, model.k, model.v), x)
    handle = model.k.register_forward_hook(lambda _module, _args, y: recorded.append(y))
    actual = lora.project_linear_layers((model.q, model.k, model.v), x)
    assert len(recorded) == 1
    assert recorded[0] is actual[1]
    handle.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: recorded.append(x))
    try:
        actual = lora.project_linear_layers((model.q, model.k, model.v), x)
    finally:
        everywhere.remove()
    assert len(recorded) >= 4
    assert all(map(torch.equal, actual, expected))
