"""The modes of gradient checkpointing: the same bits, and what each computes again."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_steps import NETWORKS, TinyStep, tiny_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dit_lora.config.load import parse_recipe
from dit_lora.config.optim import TrainConfig
from dit_lora.errors import DitLoraError
from dit_lora.fuse.api import fuse
from dit_lora.fuse.patches import get_fusion
from dit_lora.numerics import attention_calls
from dit_lora.training.execution import activation_checkpointing
from dit_lora.training.execution.activation_checkpointing import (
    CHECKPOINTING_MODES,
    CheckpointingMode,
    choose_least_memory_mode,
    is_attention_op,
    require_checkpointing,
    set_checkpointing,
    use_checkpointing_mode,
)
from dit_lora_kernels import (
    ada_norm,
    qk_norm_rope,
    relu_linear_attention,
    silu_dwconv_glu,
)

ATEN = torch.ops.aten


class Calls(TorchDispatchMode):
    """How often each op ran, and attention of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.ops["attention" if is_attention_op(func) else func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def calls(step: TinyStep, mode: CheckpointingMode) -> Counter[str]:
    """Of a forward and backward pass."""
    set_checkpointing(step.transformer, mode)
    with Calls() as op_calls:
        step.gradients()
    return op_calls.ops


@pytest.mark.parametrize("variant", NETWORKS)
def test_no_mode_changes_a_bit_and_dropout_draws_the_same(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    step = tiny_step(tiny_checkpoints, variant, dropout=0.3)
    expected = step.gradients()
    loss = step.loss()
    assert expected
    assert all(gradient.any() for gradient in expected.values())
    for mode in CHECKPOINTING_MODES:
        set_checkpointing(step.transformer, mode)
        assert torch.equal(step.loss(), loss)
        grads = step.gradients()
        assert grads.keys() == expected.keys()
        for name, gradient in grads.items():
            assert torch.equal(gradient, expected[name]), (mode, name)


def test_no_mode_changes_a_bit_under_autocast(tiny_checkpoints: dict[str, Path]) -> None:
    step = tiny_step(tiny_checkpoints, "cogvideox-5b", mixed="bf16", dropout=0.3)
    expected = step.gradients()
    for mode in CHECKPOINTING_MODES:
        set_checkpointing(step.transformer, mode)
        grads = step.gradients()
        assert all(torch.equal(grads[name], gradient) for name, gradient in expected.items()), mode


@pytest.mark.parametrize(
    ("variant", "pointwise"),
    [
        ("cogvideox-2b", "aten::gelu"),
        ("dit-tiny", "aten::gelu"),
        ("latte", "aten::gelu"),
        ("sana-600m", "aten::convolution"),
    ],
)
def test_selective_computes_all_but_attention_again(
    tiny_checkpoints: dict[str, Path], variant: str, pointwise: str
) -> None:
    step = tiny_step(tiny_checkpoints, variant)
    none, selective, full = (calls(step, mode) for mode in CHECKPOINTING_MODES)
    assert none["attention"] > 0
    assert selective["attention"] == none["attention"]
    assert full["attention"] == 2 * none["attention"]
    assert selective[pointwise] == full[pointwise] > none[pointwise]
    # No block ends in attention, so every linear layer before it runs again.
    assert selective["aten::mm"] + selective["aten::addmm"] > none["aten::mm"] + none["aten::addmm"]


@dataclass(frozen=True)
class Named:
    """An op of a library that is not here."""

    full_name: str

    def name(self) -> str:
        return self.full_name


def test_attention_is_every_fused_forward_and_nothing_else() -> None:
    attention: list[Any] = [
        ATEN._scaled_dot_product_flash_attention.default,
        ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        ATEN._scaled_dot_product_efficient_attention.default,
        ATEN._scaled_dot_product_cudnn_attention.default,
        ATEN._flash_attention_forward.default,
        Named("flash_attn::_flash_attn_forward"),
        Named("flash_attn::_flash_attn_varlen_forward"),
        Named("flash_attn_3::fwd"),
        Named("_diffusers_flash_attn_3::_flash_attn_forward"),
        Named("dit_lora::relu_linear_attention"),
    ]
    other_modes: list[Any] = [
        ATEN._scaled_dot_product_flash_attention_backward.default,
        ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
        ATEN._flash_attention_backward.default,
        ATEN.bmm.default,
        ATEN._softmax.default,
        Named("flash_attn::_flash_attn_backward"),
        Named("flash_attn_3::bwd"),
        Named("dit_lora::relu_linear_attention_backward"),
        Named("dit_lora::ada_norm"),
    ]
    assert [op.name() for op in attention if not is_attention_op(op)] == []
    assert [op.name() for op in other_modes if is_attention_op(op)] == []


class Plain(nn.Module):
    """A model without checkpointing."""


def test_a_model_without_checkpointing_is_refused_where_it_is_asked_for() -> None:
    for mode in ("selective", "full"):
        with pytest.raises(DitLoraError) as error:
            set_checkpointing(Plain(), mode)
        assert str(error.value) == (
            f"train.checkpointing={mode}: Plain has no gradient checkpointing; use auto or none"
        )
    set_checkpointing(Plain(), "none")
    require_checkpointing(Plain(), "auto")
    assert choose_least_memory_mode(Plain()) == "none"


def test_none_takes_back_what_was_set(tiny_checkpoints: dict[str, Path]) -> None:
    step = tiny_step(tiny_checkpoints, "dit-tiny")
    assert choose_least_memory_mode(step.transformer) == "full"
    before = calls(step, "none")
    set_checkpointing(step.transformer, "full")
    assert step.transformer.is_gradient_checkpointing
    assert calls(step, "none") == before


def test_a_recipe_names_a_mode(recipe_values: dict[str, Any]) -> None:
    assert TrainConfig(steps=1).checkpointing == "auto"
    for mode in ("auto", *CHECKPOINTING_MODES):
        recipe_values["train"]["checkpointing"] = mode
        assert parse_recipe(recipe_values, "test").train.checkpointing == mode
    recipe_values["train"]["checkpointing"] = "some"
    with pytest.raises(DitLoraError, match=r"train.checkpointing"):
        parse_recipe(recipe_values, "test")


@pytest.mark.parametrize("mode", CHECKPOINTING_MODES)
def test_for_a_while_everything_is_computed_again_and_then_as_before(
    tiny_checkpoints: dict[str, Path], mode: CheckpointingMode
) -> None:
    step = tiny_step(tiny_checkpoints, "cogvideox-2b")
    full = calls(step, "full")
    before = calls(step, mode)
    with (
        use_checkpointing_mode(step.transformer, choose_least_memory_mode(step.transformer)),
        Calls() as op_calls,
    ):
        step.gradients()
    assert op_calls.ops == full
    with Calls() as op_calls:
        step.gradients()
    assert op_calls.ops == before


def test_a_model_without_checkpointing_stays_as_it_is() -> None:
    model = nn.Linear(2, 2)
    with use_checkpointing_mode(model, choose_least_memory_mode(model)):
        assert not hasattr(model, "gradient_checkpointing")


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ops run as their references: the interpreter of kernels is slow."""
    for module in (ada_norm, qk_norm_rope, relu_linear_attention, silu_dwconv_glu):
        monkeypatch.setattr(module, "launches", lambda _tensor: False)


def block_ops(step: TinyStep) -> list[str]:
    """The ops that a step's dispatch modes of selective checkpointing were asked about."""
    requests: list[str] = []
    real = activation_checkpointing._choose_policy

    def noted(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if not context.is_recompute:  # torch 2.11 asks then too
            requests.append(op.name())
        return real(context, op, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_checkpointing, "_choose_policy", noted)
        step.gradients()
    return requests


OPS_OF = {
    "cogvideox-5b": ("lora_linear", "qk_norm_rope", "ada_norm"),
    "dit-tiny": ("lora_linear", "ada_norm"),
    "sana-600m": ("lora_linear", "ada_norm", "relu_linear_attention", "silu_dwconv_glu"),
    "flux2-klein": ("lora_linear", "qk_norm_rope", "ada_norm"),
    "qwen-image": ("lora_linear", "qk_norm_rope", "ada_norm"),
    "wan-2.1-t2v": ("lora_linear", "qk_norm_rope", "ada_norm"),
    "z-image": ("lora_linear", "qk_norm_rope", "ada_norm"),
    "latte": ("lora_linear",),  # two calls of attention in a block
}


@pytest.mark.parametrize("variant", OPS_OF)
@pytest.mark.usefixtures("references")
def test_fused_attention_alone_meets_the_dispatch_modes(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    """From a block's second call on; the same bits, and attention is not computed again."""
    step = tiny_step(tiny_checkpoints, variant)
    fuse(step.transformer, dict.fromkeys(OPS_OF[variant], "on"), check=False)
    expected = step.gradients()
    set_checkpointing(step.transformer, "selective")
    first_ops, second = block_ops(step), block_ops(step)
    assert len(second) < len(first_ops) / 5
    attention = sum(map(is_named_attention, first_ops))
    assert sum(map(is_named_attention, second)) == attention > 0
    grads = step.gradients()
    assert all(torch.equal(grads[name], gradient) for name, gradient in expected.items())
    assert calls(step, "selective")["attention"] == attention


def is_named_attention(name: str) -> bool:
    return bool(activation_checkpointing._ATTENTION_OP_PATTERN.fullmatch(name.partition(".")[0]))


@pytest.mark.usefixtures("references")
def test_stock_attention_is_still_kept_after_kernels_are_switched_off(
    tiny_checkpoints: dict[str, Path],
) -> None:
    step = tiny_step(tiny_checkpoints, "cogvideox-5b")
    fuse(step.transformer, dict.fromkeys(OPS_OF["cogvideox-5b"], "on"), check=False)
    attention = calls(step, "none")["attention"]
    for _ in range(2):
        assert calls(step, "selective")["attention"] == attention
    fusion = get_fusion(step.transformer)
    assert fusion is not None
    with fusion.use_stock_code():
        # At once it is computed twice, since nobody marks its calls; from the next step on it is kept.
        assert calls(step, "selective")["attention"] == 2 * attention
        assert calls(step, "selective")["attention"] == attention
    assert calls(step, "selective")["attention"] == attention


@pytest.mark.usefixtures("references")
def test_a_block_that_raises_leaves_nothing_behind(tiny_checkpoints: dict[str, Path]) -> None:
    step = tiny_step(tiny_checkpoints, "dit-tiny")
    fuse(step.transformer, dict.fromkeys(OPS_OF["dit-tiny"], "on"), check=False)
    set_checkpointing(step.transformer, "selective")
    for _ in range(2):
        handle = step.transformer.transformer_blocks[0].ff.register_forward_pre_hook(_fail)
        with pytest.raises(ArithmeticError):
            step.loss()
        handle.remove()
        assert attention_calls._THREAD_STATE.provider is None
        step.gradients()


def _fail(*_: Any) -> None:
    raise ArithmeticError
