"""Checkpointing and the count of activations, of models that Transformers' switch is for."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import tiny_chat_models as tiny
import torch
from peft import LoraConfig
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dit_lora.data.cache.cache import Spec
from dit_lora.families import answer_losses
from dit_lora.families.answer_losses import add_answer_losses
from dit_lora.training.execution.activation_checkpointing import (
    CHECKPOINTING_MODES,
    CheckpointingMode,
    choose_least_memory_mode,
    is_attention_op,
    set_checkpointing,
    should_keep_outputs,
    supports_checkpointing,
    use_checkpointing_mode,
)
from dit_lora.training.execution.activations import measure_activations
from dit_lora.training.execution.fake_step import AllocationTracker

CPU = torch.device("cpu")


def is_checkpointed(model: Any) -> bool:
    """What Transformers says, whose name for it changed between 5.17 and 5.23."""
    newer = getattr(model, "is_activation_checkpointing", None)
    return bool(model.is_gradient_checkpointing if newer is None else newer)


TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]


class ChatStep:
    """A tiny chat model in training: a frozen base, LoRA with dropout, and, of VideoChat2, a connector that trains."""

    def __init__(self, name: str) -> None:
        self.model: Any = add_answer_losses(tiny.MODELS[name]())
        self.model.requires_grad_(False)
        # Not `down_proj` of a vision tower: its inputs then need no gradient in any block.
        lora = LoraConfig(r=4, lora_dropout=0.3, target_modules=TARGETS, init_lora_weights=False)
        self.model.add_adapter(lora)
        if name == "videochat2":
            self.model.model.qformer.requires_grad_()
        self.model.train()
        self.batch = tiny.batch(tiny.samples(name))

    def loss(self) -> torch.Tensor:
        """Equal at every call: dropout draws the same."""
        torch.manual_seed(5)
        return self.model(**self.batch).mean()

    def gradients(self) -> dict[str, torch.Tensor]:
        self.loss().backward()
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return grads

    def needs(self) -> dict[CheckpointingMode, int]:
        integer_inputs = {n: t for n, t in self.batch.items() if not t.is_floating_point()}
        spec: Spec = {n: (t.shape, t.dtype) for n, t in self.batch.items()}
        return dict(measure_activations(self.model, lambda m, b: m(**b), spec, CPU, integer_inputs=integer_inputs))

    @property
    def own(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers(), *self.batch.values()]


@pytest.fixture
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ChatStep:
    monkeypatch.setattr(answer_losses, "CHUNK_ROWS", 4)
    return ChatStep(request.param)


every_model = pytest.mark.parametrize("step", tiny.MODELS, indirect=True)


@every_model
def test_no_mode_changes_a_bit_and_dropout_draws_the_same(step: ChatStep) -> None:
    assert supports_checkpointing(step.model)
    assert choose_least_memory_mode(step.model) == "full"
    expected, loss = step.gradients(), step.loss()
    assert all(expected[name].any() for name in expected if "lora" in name)
    assert sum("lora" in name for name in expected) >= 2 * 3 * LAYERS
    for mode in CHECKPOINTING_MODES:
        set_checkpointing(step.model, mode)
        assert torch.equal(step.loss(), loss), mode
        grads = step.gradients()
        assert grads.keys() == expected.keys()
        for name, gradient in grads.items():
            assert torch.equal(gradient, expected[name]), (mode, name)


class Calls(TorchDispatchMode):
    """How often each op ran, and attention of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops["attention" if is_attention_op(func) else func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def calls(step: ChatStep) -> Counter[str]:
    with Calls() as op_calls:
        step.gradients()
    return op_calls.ops


LAYERS = tiny.TEXT["num_hidden_layers"]


@pytest.mark.parametrize("step", ["mistral"], indirect=True)
def test_each_mode_computes_again_what_it_says(step: ChatStep) -> None:
    counts = {}
    for mode in CHECKPOINTING_MODES:
        set_checkpointing(step.model, mode)
        counts[mode] = calls(step)
    assert [counts[mode]["attention"] for mode in CHECKPOINTING_MODES] == [
        LAYERS,
        LAYERS,
        2 * LAYERS,
    ]
    assert [counts[mode]["aten::silu"] for mode in CHECKPOINTING_MODES] == [
        LAYERS,
        2 * LAYERS,
        2 * LAYERS,
    ]
    with use_checkpointing_mode(step.model, choose_least_memory_mode(step.model)):
        assert calls(step) == counts["full"]
    assert calls(step) == counts["full"]  # the mode that was set last
    set_checkpointing(step.model, "none")
    assert calls(step) == counts["none"]


@pytest.mark.parametrize("step", ["videochat2"], indirect=True)
def test_what_is_frozen_and_in_eval_is_computed_once(step: ChatStep) -> None:
    """No gradient passes the vision tower, and nothing makes it."""
    vision = step.model.model.vision_encoder.eval()
    set_checkpointing(step.model, "full")
    runs = Counter[str]()
    for name, module in (
        ("vision", vision.encoder.blocks[0].mlp),
        ("qformer", _layer(step).attention),
    ):
        module.register_forward_hook(lambda *_, name=name: runs.update([name]))
    step.gradients()
    assert runs == {"vision": 1, "qformer": 2}
    assert not step.model.get_input_embeddings()._forward_hooks  # frozen, and left so


def _layer(step: ChatStep) -> Any:
    return step.model.model.qformer.encoder.layer[0]


def test_transformers_switch_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    step = ChatStep("mistral")
    set_checkpointing(step.model, "selective")
    assert is_checkpointed(step.model)
    set_checkpointing(step.model, "none")
    assert not is_checkpointed(step.model)
    assert choose_least_memory_mode(nn.Linear(2, 2)) == "none"
    monkeypatch.setattr(type(step.model), "supports_gradient_checkpointing", False)
    assert choose_least_memory_mode(step.model) == "none"


@torch.library.custom_op("dit_lora_test_flash_attn::some_forward", mutates_args=())
def drawing_attention(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Named as a fused attention, and drawing where it is run, as those with dropout do."""
    return x * (torch.rand(x.shape) >= dropout_p) if dropout_p else x.clone()


drawing_attention.register_autograd(lambda _context, gradient: (gradient, None))


class Drops(nn.Module):
    """A block with dropout in its attention and after it."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(drawing_attention(x, self.rate)).tanh(), 0.5)


class Blocks(nn.Module):
    """As little of a Diffusers model as checkpointing needs."""

    _supports_gradient_checkpointing = True
    function: Any = None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.block = Drops(rate)

    def enable_gradient_checkpointing(self, function: Any) -> None:
        self.function = function

    def disable_gradient_checkpointing(self) -> None:
        self.function = None

    def gradient(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        output = self.function(self.block, x) if self.function else self.block(x)
        (gradient,) = torch.autograd.grad(output.sum(), self.block.linear.weight)
        return gradient


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_dropout_after_attention_with_dropout_draws_the_same(rate: float) -> None:
    """Attention that is kept would not draw again, and what follows would draw its numbers."""
    torch.manual_seed(0)
    model, x = Blocks(rate), torch.randn(5, 6, requires_grad=True)
    expected = model.gradient(x)
    for mode in CHECKPOINTING_MODES:
        set_checkpointing(model, mode)
        with Calls() as op_calls:
            assert torch.equal(model.gradient(x), expected), mode
        is_recomputed = mode == "full" or (mode == "selective" and rate > 0)
        assert op_calls.ops["attention"] == 1 + is_recomputed


def test_attention_is_kept_unless_it_drops() -> None:
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert should_keep_outputs(op, (), {})
    assert should_keep_outputs(op, (0, 0, 0, None, True), {})
    assert not should_keep_outputs(op, (0, 0, 0, None, True, 0.1), {})
    assert not should_keep_outputs(op, (), {"dropout_p": 0.1})
    assert not should_keep_outputs(torch.ops.aten.mm.default, (), {})


@every_model
def test_the_count_is_what_a_real_step_saves(step: ChatStep) -> None:
    """By autograd's own word, but for the logits of a chunk, which no mode keeps."""
    state, before = torch.get_rng_state(), dict(step.model.named_parameters())
    needs = step.needs()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p is before[n] for n, p in step.model.named_parameters())
    assert not is_checkpointed(step.model)
    storages: dict[int, torch.UntypedStorage] = {}
    weights = {t.untyped_storage().data_ptr() for t in step.own[: -len(step.batch)]}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda saved: saved):
        loss = step.loss()
    saved = sum(storage.nbytes() for storage in storages.values())
    del loss
    rows, vocabulary, width = 4, tiny.TEXT["vocab_size"], tiny.TEXT["hidden_size"]
    answers = step.batch["answer_labels"].numel()
    assert needs["none"] - saved >= rows * vocabulary * 4
    # Of one chunk: logits, what LoRA and its dropout save; the hidden states and labels of all.
    assert needs["none"] - saved <= rows * (vocabulary + 3 * width + 16) * 4 + answers * (width + 8) * 4


@every_model
def test_real_peaks_are_in_the_order_of_the_count(step: ChatStep) -> None:
    needs = step.needs()
    assert needs["none"] > needs["selective"] >= needs["full"]
    peaks = {}
    for mode in CHECKPOINTING_MODES:
        set_checkpointing(step.model, mode)
        with AllocationTracker(step.own) as live:
            step.gradients()
        peaks[mode] = live.max_bytes
    assert peaks["none"] > peaks["selective"] >= peaks["full"]


class Held(nn.Module):
    """Like a block of Transformers, with its own named table."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x * table


class HeldBlocks(Blocks):
    def __init__(self) -> None:
        super().__init__(0.0)
        self.held = Held()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.block.linear.bias
        for factor in (2, 3):
            x = self.function(partial(self.held, table=factor * torch.ones(6)), x)
        return x.sum()


def test_what_blocks_are_given_by_name_is_kept() -> None:
    """x of 5 x 6 before each of two blocks, and x for the bias; a table of 6 for each."""
    spec: Spec = {"x": (torch.Size((5, 6)), torch.float32)}
    needs = measure_activations(HeldBlocks(), lambda m, b: m(**b), spec, CPU)
    assert needs["full"] == 4 * (3 * 30 + 2 * 6)


def test_logits_are_counted_by_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    step = ChatStep("mistral")
    results = {}
    for rows in (2, 8):
        monkeypatch.setattr(answer_losses, "CHUNK_ROWS", rows)
        results[rows] = step.needs()
    width = tiny.TEXT["vocab_size"] * 4
    assert results[8]["none"] - results[2]["none"] >= 6 * width
