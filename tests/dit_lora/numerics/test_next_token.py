"""Next-token losses against fp64, at the memory of one chunk of logits."""

import weakref

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dit_lora.errors import DitLoraError
from dit_lora.numerics.objectives import IGNORE_INDEX, compute_next_token_losses

BATCH, ANSWERS, WIDTH, VOCABULARY = 3, 7, 10, 37
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
"""Of losses near 4 and of gradients, relative to their largest: fp32 sums of 37 terms; bf16 rounds logits, 2^-8."""


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, nn.Linear]:
    torch.manual_seed(0)
    hidden = torch.randn(BATCH, ANSWERS, WIDTH).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (BATCH, ANSWERS))
    labels[0, 4:] = IGNORE_INDEX
    labels[2, ::2] = IGNORE_INDEX
    return hidden, labels, nn.Linear(WIDTH, VOCABULARY).to(dtype)


def in_fp64(hidden: torch.Tensor, labels: torch.Tensor, head: nn.Linear) -> list[torch.Tensor]:
    """Per-sample losses, and the gradients of their weighted sum, from the same numbers in fp64."""
    states = hidden.detach().double().requires_grad_()
    weight, bias = (p.detach().double().requires_grad_() for p in (head.weight, head.bias))
    losses = torch.stack([F.cross_entropy(F.linear(x, weight, bias), y) for x, y in zip(states, labels, strict=True)])
    return [losses, *torch.autograd.grad(losses @ WEIGHTS.double(), (states, weight, bias))]


WEIGHTS = torch.tensor([0.3, 1.7, -0.9])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, ANSWERS, BATCH * ANSWERS, 1000])
def test_values_and_gradients_are_those_of_fp64(chunk: int, dtype: torch.dtype) -> None:
    hidden, labels, head = drawn(dtype)
    losses = compute_next_token_losses(hidden, labels, head, chunk_size=chunk)
    assert losses.dtype is torch.float32
    results = torch.autograd.grad(losses @ WEIGHTS, (hidden, head.weight, head.bias))
    for actual, expected in zip((losses, *results), in_fp64(hidden, labels, head), strict=True):
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[dtype]


def test_logits_of_a_bf16_head_are_summed_in_fp32() -> None:
    """A thousand equal logits: log-sum-exp in bf16 would be a multiple of 2^-5."""
    head = nn.Linear(2, 1000, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(head.weight)
    losses = compute_next_token_losses(
        torch.ones(1, 1, 2, dtype=torch.bfloat16), torch.zeros(1, 1).long(), head, chunk_size=1
    )
    torch.testing.assert_close(losses, torch.tensor([1000.0]).log(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_a_sample_without_labels_is_nan_and_leaves_its_neighbours_alone(chunk: int) -> None:
    hidden, labels, head = drawn(torch.float32)
    labels[1] = IGNORE_INDEX
    losses = compute_next_token_losses(hidden, labels, head, chunk_size=chunk)
    assert losses.isnan().tolist() == [False, True, False]
    expected = compute_next_token_losses(hidden[::2], labels[::2], head, chunk_size=chunk)
    torch.testing.assert_close(losses[::2], expected)
    for total_loss, weights in ((losses.sum(), torch.ones(2)), (losses @ WEIGHTS, WEIGHTS[::2])):
        grads = torch.autograd.grad(total_loss, (hidden, head.weight), retain_graph=True)
        expected_grads = torch.autograd.grad(expected @ weights, (hidden, head.weight), retain_graph=True)
        torch.testing.assert_close(grads, expected_grads)


class _Logits(TorchDispatchMode):
    """Notes every tensor as wide as the vocabulary that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.UntypedStorage]] = []
        self.most_rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            # Weights and their gradients are vocabulary x width; logits are rows x vocabulary.
            if isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and leaf.shape[1:] == (VOCABULARY,):
                self.most_rows = max(self.most_rows, len(leaf))
                self.made.append(weakref.ref(leaf))
        return output

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self.made)


def test_no_more_logits_than_a_chunk_are_made_and_none_are_kept() -> None:
    hidden, labels, head = drawn(torch.float32)
    chunk = 4
    with _Logits() as logits:
        losses = compute_next_token_losses(hidden, labels, head, chunk_size=chunk)
        num_alive = logits.alive
        losses.sum().backward()
    assert logits.made
    assert not num_alive
    # The gradient of the weight comes transposed: width rows.
    assert logits.most_rows <= max(chunk, WIDTH)
    with _Logits() as logits:
        full_loss = F.cross_entropy(head(hidden.flatten(0, 1)), labels.flatten(), ignore_index=IGNORE_INDEX)
        assert logits.alive
        assert logits.most_rows == BATCH * ANSWERS
    del full_loss


def test_dropout_of_an_adapter_on_the_head_is_the_same_in_backward() -> None:
    hidden, labels, linear = drawn(torch.float32)
    root = nn.Sequential(linear)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], lora_dropout=0.5), root)
    head = root[0].train()
    nn.init.normal_(head.lora_B["default"].weight)
    trained = (hidden, head.lora_A["default"].weight, head.lora_B["default"].weight)
    chunk = 3
    torch.manual_seed(1)
    losses = compute_next_token_losses(hidden, labels, head, chunk_size=chunk)
    torch.manual_seed(7)  # whatever is drawn between forward and backward
    grads = torch.autograd.grad(losses @ WEIGHTS, trained)
    torch.manual_seed(1)
    logits = torch.cat([head(rows) for rows in hidden.flatten(0, 1).split(chunk)])
    expected = torch.stack(
        [F.cross_entropy(sample, label) for sample, label in zip(logits.view(BATCH, ANSWERS, -1), labels, strict=True)]
    )
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected @ WEIGHTS, trained))


def test_without_gradients_nothing_is_computed_twice() -> None:
    hidden, labels, head = drawn(torch.float32)
    with torch.no_grad(), _Logits() as logits:
        losses = compute_next_token_losses(hidden, labels, head, chunk_size=5)
    torch.testing.assert_close(losses, in_fp64(hidden, labels, head)[0].float())
    assert not logits.alive


def test_a_chunk_of_nothing_is_refused() -> None:
    hidden, labels, head = drawn(torch.float32)
    with pytest.raises(DitLoraError, match="at least 1 row; got 0"):
        compute_next_token_losses(hidden, labels, head, chunk_size=0)
