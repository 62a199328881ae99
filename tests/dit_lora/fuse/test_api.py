"""`fuse` and `unfuse` as users call them: active kernels, messages, refusals and detected faults."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fuse_checks import adapted, assert_equal, by, values
from torch import nn

import dit_lora
from dit_lora.errors import DitLoraError
from dit_lora.fuse.api import fuse, unfuse
from dit_lora.fuse.models import streams
from dit_lora.fuse.patches import OPS, get_fusion
from dit_lora.guard.fallbacks import find_fallback, list_model_fallbacks
from dit_lora.models.video_dit import VideoDiTTransformer3DModel

ON = {"lora_linear": "on", "ada_norm": "on"}


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with by("reference", monkeypatch):
        yield


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    transformer = VideoDiTTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=2,
        out_channels=4,
        num_layers=2,
        sample_frames=2,
        sample_height=4,
        sample_width=4,
        num_classes=3,
    )
    adapted(transformer, ["to_q", "to_k", "to_v", "to_out.0"])
    for block in transformer.transformer_blocks:  # untrained they are zero, whatever the sample
        nn.init.normal_(block.adaln.linear.weight)
    return transformer


def given(frames: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(2, 2, frames, 4, 4, generator=generator),
        "timestep": torch.tensor([3, 700]),
        "class_labels": torch.tensor([2, 0]),
    }


def run(model: nn.Module, frames: int = 2) -> dict[str, torch.Tensor]:
    return values(model, lambda m: m(**given(frames), return_dict=False), {})


def test_the_package_is_the_verb(model: nn.Module) -> None:
    from dit_lora.fuse import fuse as imported

    assert imported is fuse
    assert dit_lora.fuse(model, ON).ops == ["lora_linear", "ada_norm"]
    dit_lora.unfuse(model)
    assert get_fusion(model) is None


def test_auto_uses_what_helps_here_and_says_what_does_not(model: nn.Module) -> None:
    report = fuse(model)
    if torch.cuda.is_available():
        assert report.ops == ["lora_linear", "ada_norm"]
        return
    assert report.ops == ["lora_linear"]
    text = str(report)
    assert "lora_linear (8 modules)" in text
    assert "ada_norm" in text
    assert "with `on` it runs in plain PyTorch" in text


def test_off_is_off(model: nn.Module) -> None:
    before = [set(vars(module)) for module in model.modules()]
    report = fuse(model, dict.fromkeys(OPS, "off"))
    assert report.ops == []
    assert "nothing to replace" in str(report)
    added = [set(vars(m)) - old for m, old in zip(model.modules(), before, strict=True)]
    assert not any("forward" in names for names in added)
    assert not any(hasattr(getattr(m, "processor", None), "stock") for m in model.modules())


def test_fusing_again_begins_anew(model: nn.Module) -> None:
    expected = run(model)
    fuse(model, ON)
    assert fuse(model, {"lora_linear": "on", "ada_norm": "off"}).ops == ["lora_linear"]
    assert len(model._forward_pre_hooks) == 1
    unfuse(model)
    assert not model._forward_pre_hooks
    assert_equal(run(model), expected, 0.0)


@pytest.mark.parametrize(
    ("ops", "attention", "words"),
    [
        ({"adanorm": "on", "x": "on"}, "auto", "unknown kernels adanorm, x"),
        ({"ada_norm": True}, "auto", "ada_norm: True"),
        ({"silu_dwconv_glu": "on"}, "auto", "can use silu_dwconv_glu"),
        ({}, "sage", "sage does not support training"),
        ({}, "flash", "flash cannot be used here"),
    ],
)
def test_what_cannot_be_is_refused(model: nn.Module, ops: dict[str, Any], attention: str, words: str) -> None:
    before = [set(vars(module)) for module in model.modules()]
    with pytest.raises(DitLoraError, match=words):
        fuse(model, ops, attention=attention)
    assert get_fusion(model) is None
    assert [set(vars(module)) for module in model.modules()] == before
    assert not list_model_fallbacks(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_backend_reaches_every_attention(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    requests = []
    backends = _AttentionBackendRegistry._backends
    name = AttentionBackendName._NATIVE_MATH
    native = backends[name]

    def recorded(**kwargs: Any) -> torch.Tensor:
        requests.append(kwargs["query"].shape)
        return native(**kwargs)

    expected = run(model)
    monkeypatch.setitem(backends, name, recorded)
    before = _AttentionBackendRegistry._active_backend
    fuse(model, dict.fromkeys(OPS, "off"), attention="_native_math", check=False)
    assert_equal(run(model), expected)
    assert requests == [(2, 8, 2, 8)] * 2
    assert _AttentionBackendRegistry._active_backend is before
    with find_fallback(list_model_fallbacks(model), "attention:_native_math").disable_temporarily():
        assert_equal(run(model), expected)
    assert len(requests) == 2


def test_a_backend_that_diffusers_sets_later_is_heeded(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    requests = []
    name = AttentionBackendName._NATIVE_MATH
    native = _AttentionBackendRegistry._backends[name]
    recorded = lambda **inputs: (requests.append(1), native(**inputs))[1]  # noqa: E731
    monkeypatch.setitem(_AttentionBackendRegistry._backends, name, recorded)
    expected = run(model)
    fuse(model, ON, check=False)
    for module in model.modules():
        if hasattr(module, "processor"):  # as ModelMixin.set_attention_backend does
            module.processor._attention_backend = name
    assert_equal(run(model), expected)
    assert len(requests) == 2


def wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample is modulated by the scale of the one before it."""
    joint_ada_norm = streams.joint_ada_norm

    def wrong(given: Any, *args: Any, **kwargs: Any) -> Any:
        rolled = [stream._replace(scale=stream.scale.roll(1, 0)) for stream in given]
        return joint_ada_norm(rolled, *args, **kwargs)

    monkeypatch.setattr(streams, "joint_ada_norm", wrong)


def test_the_first_forward_of_a_shape_finds_a_wrong_kernel_and_goes_on_without(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(model)
    fuse(model, ON)
    fusion = get_fusion(model)
    fusion_on = dict(fusion.op_states)
    wrong_row(monkeypatch)
    set_optional(model)
    with pytest.warns(UserWarning, match="kernel ada_norm differs from its reference"):
        actual = run(model)
    assert_equal(actual, expected)
    assert fusion.op_states == {**fusion_on, "ada_norm": False}
    assert not fusion.stock


def test_of_one_sample_each_block_is_given_a_second_one(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler may come later with a batch of two, for guidance."""
    fuse(model, ON)
    wrong_row(monkeypatch)
    set_optional(model)
    single = {name: tensor[:1] for name, tensor in given(2).items()}
    with pytest.warns(UserWarning, match="kernel ada_norm differs from its reference"):
        model(**single)


def set_optional(model: nn.Module) -> None:
    """As if `auto` had chosen them: only a GPU makes it do so."""
    for switch in list_model_fallbacks(model):
        object.__setattr__(switch, "required", False)


def test_a_wrong_kernel_that_was_asked_for_is_refused(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    fuse(model, ON)
    wrong_row(monkeypatch)
    with pytest.raises(DitLoraError, match=r"ada_norm differs.*it is set to on"):
        run(model)


def test_a_shape_is_compared_once_and_gradients_and_random_state_stay(model: nn.Module) -> None:
    fuse(model, ON)
    calls = []
    model.transformer_blocks[0].register_forward_hook(lambda *_: calls.append(1))
    trained = next(p for p in model.parameters() if p.requires_grad)
    trained.grad = torch.full_like(trained, 7.0)
    state = torch.get_rng_state()
    run(model)
    assert torch.equal(torch.get_rng_state(), state)
    calls_before = len(calls)
    assert calls_before > 3
    run(model)
    assert len(calls) == calls_before + 1
    run(model, frames=3)
    assert len(calls) > calls_before + 3
    assert trained.grad.unique().tolist() == [7.0]


def test_evaluation_is_not_compared(model: nn.Module) -> None:
    fuse(model, ON)
    calls = []
    model.transformer_blocks[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(**given())
    assert len(calls) == 1


def test_a_module_that_is_wrapped_already_keeps_its_forward(model: nn.Module) -> None:
    block = model.transformer_blocks[0]
    stock = block.forward
    block.forward = lambda *args, **kwargs: stock(*args, **kwargs)
    report = fuse(model, ON)
    assert "its forward is wrapped already; fuse before hooks and offload are added" in str(report)
    unfuse(model)
    assert "forward" in vars(block)


def test_what_accelerate_wraps_around_the_model_stays(model: nn.Module) -> None:
    expected = run(model)
    fuse(model, ON, check=False)
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    unfuse(model)
    assert "forward" in vars(model)
    assert_equal(run(model), expected, 0.0)


def test_unfusing_below_a_later_hook_is_refused(model: nn.Module) -> None:
    fuse(model, ON)
    block = model.transformer_blocks[1]
    ours = block.forward
    block.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(DitLoraError, match=r"transformer_blocks\.1"):
        unfuse(model)
    block.forward = ours
    unfuse(model)


def test_adapters_that_are_disabled_or_changed_later_are_honoured(model: nn.Module) -> None:
    fuse(model, ON, check=False)
    run(model)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.lora_A["default"].weight.data.mul_(3.0)  # past autograd's version counter
    fused = run(model)
    with get_fusion(model).use_stock_code():
        assert_equal(fused, run(model))
        stock = {}
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.enable_adapters(False)
        with torch.no_grad():
            stock = model(**given(), return_dict=False)[0]
    with torch.no_grad():
        torch.testing.assert_close(model(**given(), return_dict=False)[0], stock)


class Masked(nn.Module):
    """A model that records the masks that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.masks: list[torch.Tensor | None] = []

    def forward(
        self,
        hidden_states: torch.Tensor,
        must: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.masks.append(encoder_attention_mask)
        return self.linear(hidden_states)


def test_a_mask_that_masks_nothing_becomes_none() -> None:
    model = adapted(Masked(), ["linear"])
    fuse(model, {"lora_linear": "on"}, check=False)
    full = torch.ones(2, 5)
    part, bias = full.clone(), torch.ones(2, 1, 5)
    part[1, 4] = 0
    for mask in (full, full.bool(), part, bias, None):
        model(torch.randn(2, 5, 4), full, encoder_attention_mask=mask)
    masks = model.masks
    assert masks[0] is None
    assert masks[1] is None
    assert masks[2] is part
    assert masks[3] is bias
    assert masks[4] is None
    unfuse(model)
    model(torch.randn(2, 5, 4), full, encoder_attention_mask=full)
    assert model.masks[-1] is full
