"""Weights and gradients of every layout and dtype are checked, and healthy loops are not changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop_helpers import everything, same
from torch import nn

from dit_lora.guard.attach.finite_values import is_finite_tensor, to_strided_real
from dit_lora.guard.attach.guard import Guard


class Words(nn.Module):
    """A table whose gradients are sparse; the weight of each row comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).mean(1) * weights[:, None]


class Waves(nn.Module):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = tokens[:, :4].float() * weights[:, None]
        return torch.fft.ifft(torch.fft.fft(x) * self.spectrum).real


class Half(nn.Module):
    """bf16 weights, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.out(tokens[:, :4].bfloat16()).float() * self.scale * weights[:, None]


class Transposed(nn.Module):
    """Weights that are not contiguous, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 3).t())
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return tokens[:, :4].float() @ self.matrix.t() * weights[:, None]


class Graph(nn.Module):
    """Sparse matrices that are not trained, in buffers, as graph networks hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)
        self.register_buffer("near", torch.eye(4).to_sparse())
        self.register_buffer("far", torch.eye(4).to_sparse_csr())

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = tokens[:, :4].float().t()
        return self.out((self.far @ (self.near @ x)).t()) * weights[:, None]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "sparse": (Words, torch.optim.SparseAdam),
    "sparse with SGD": (Words, torch.optim.SGD),
    "complex": (Waves, torch.optim.AdamW),
    "bf16": (Half, torch.optim.AdamW),
    "bf16 one by one": (Half, lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=False)),
    "transposed": (Transposed, torch.optim.AdamW),
    "sparse buffers": (Graph, torch.optim.AdamW),
}


def train(name: str, bad_steps: tuple[int, ...], *, guarded: bool) -> tuple[Any, Guard | None]:
    torch.manual_seed(0)
    make, optimizer_of = CASES[name]
    model = make()
    optimizer = optimizer_of(model.parameters(), lr=0.01)
    guard = Guard.watch(model, optimizer) if guarded else None
    for step in range(1, 6):
        draws = torch.Generator().manual_seed(step)
        tokens, weights = torch.randint(0, 9, (3, 5), generator=draws), torch.ones(3)
        if step in bad_steps:
            weights[1] = torch.nan
        before = everything([model], [optimizer])
        optimizer.zero_grad()
        (model(tokens, weights) - 1).square().mean().backward()
        optimizer.step()
        assert guard is None or same(everything([model], [optimizer]), before) is (step in bad_steps)
    return everything([model], [optimizer]), guard


@pytest.mark.parametrize("name", CASES)
def test_a_healthy_loop_trains_alike_and_a_bad_step_is_skipped(name: str) -> None:
    unguarded, _ = train(name, (), guarded=False)
    watched, guard = train(name, (), guarded=True)
    assert same(unguarded, watched)
    assert guard is not None
    assert guard.events == []
    state, guard = train(name, (3,), guarded=True)
    assert all(map(is_finite_tensor, state))
    assert guard is not None
    (event,) = guard.events
    assert (event["step"], event["action"]) == (3, "skip")
    assert event["verdict"]["cause"] == "inputs"
    assert event["sample_ids"] == ["row 1 of micro-batch 0"]


@pytest.mark.parametrize("name", CASES)
def test_a_bad_weight_is_put_back_in_the_step_that_spoiled_it(name: str) -> None:
    torch.manual_seed(0)
    make, optimizer_of = CASES[name]
    model = make()
    optimizer = optimizer_of(model.parameters(), lr=torch.inf)
    guard = Guard.watch(model, optimizer)
    start = everything([model], [])
    tokens = torch.randint(0, 9, (3, 5))
    (model(tokens, torch.ones(3)) - 1).square().mean().backward()
    optimizer.step()
    (event,) = guard.events
    assert (event["step"], event["kind"]) == (1, "non_finite_weights")
    assert event["weights_of_step"] == 0
    assert same(everything([model], []), start)


def dense(value: float) -> torch.Tensor:
    return torch.tensor([[1.0, 0.0], [0.0, value]])


LAYOUTS: dict[str, Callable[[float], torch.Tensor]] = {
    "coo": lambda value: dense(value).to_sparse(),
    "csr": lambda value: dense(value).to_sparse_csr(),
    "csc": lambda value: dense(value).to_sparse_csc(),
    "complex": lambda value: torch.complex(torch.ones(2, 2), dense(value)),
    "fp8": lambda value: dense(value).to(torch.float8_e5m2),
    "nested": lambda value: torch.nested.nested_tensor([torch.ones(2), dense(value)[1]], layout=torch.jagged),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # some layouts are new
def test_values_of_any_layout_and_dtype_are_looked_at(layout: str) -> None:
    assert is_finite_tensor(LAYOUTS[layout](3.0))
    assert to_strided_real(LAYOUTS[layout](3.0)).layout is torch.strided
    for value in (torch.nan, torch.inf, -torch.inf):
        assert not is_finite_tensor(LAYOUTS[layout](value))


def test_what_has_no_values_to_look_at_is_finite() -> None:
    assert is_finite_tensor(torch.empty(0, 3))
    assert is_finite_tensor(torch.tensor(3))
    assert is_finite_tensor(torch.empty(2, device="meta"))
