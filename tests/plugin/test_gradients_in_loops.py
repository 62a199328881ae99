"""`gradient_every` in a loop of one's own: backward passes against outputs' slopes, whatever the loss is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from dit_lora.guard import Guard, LoopConfig


class Net(nn.Module):
    """Two layers and dropout; `factor` is that of the last layer's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)
        self.last = nn.Linear(16, 3)
        self.factor, self.is_detached, self.adds = 1.0, False, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.norm(self.first(x))))
        hidden = hidden.detach() if self.is_detached else hidden
        output = self.last(hidden)
        self.adds *= 2
        # The same value; its gradient is multiplied.
        return output.detach() + self.factor * (output - output.detach()) + self.adds


@dataclass
class Loop:
    """A loop of two micro-batches a step; `change` is called before each step with its number."""

    change: Callable[["Loop", int], None] = lambda loop, step: None
    gradient_every: int = 2
    clears: bool = True
    penalty: float = 0.0
    clips: bool = False
    logged: list[str] = field(default_factory=list)

    def run(self, monkeypatch: pytest.MonkeyPatch, *, steps: int = 4) -> Guard:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        guard = Guard.watch(self.net, self.optimizer, config=LoopConfig(gradient_every=self.gradient_every))
        monkeypatch.setattr(guard._host, "log", self.logged.append)
        for step in range(1, steps + 1):
            self.change(self, step)
            for _ in range(2):
                loss = (self.net(torch.randn(4, 6)) - torch.randn(4, 3)).square().mean() / 2
                penalty = sum(p.square().sum() for p in self.net.parameters())
                (loss + self.penalty * penalty).backward()
                if self.clips:
                    nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
            self.optimizer.step()
            if self.clears:
                self.optimizer.zero_grad()
        guard.detach()
        return guard


def set_at(step: int, **values: Any) -> Callable[[Loop, int], None]:
    """Set attributes of the loop, or of its model where it has them, from a step on."""

    def change(loop: Loop, number: int) -> None:
        if number == step:
            for name, value in values.items():
                setattr(loop.net if hasattr(loop.net, name) else loop, name, value)

    return change


@pytest.mark.parametrize("options", [{}, {"penalty": 0.3}, {"clips": True}])
def test_a_healthy_loop_agrees_and_keeps_its_bits(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    checked, unchecked = Loop(**options), Loop(gradient_every=0, **options)
    assert checked.run(monkeypatch).events == unchecked.run(monkeypatch).events == []
    state, other_state = checked.net.state_dict(), unchecked.net.state_dict()
    assert all(torch.equal(state[name], other_state[name]) for name in state)
    assert [line[:45] for line in checked.logged] == ["guard: step 1: the gradient agrees with the l"]
    assert unchecked.logged == []


@pytest.mark.parametrize(
    ("values", "cause", "module"),
    [
        ({"factor": 1.03}, "unknown", "last"),
        ({"is_detached": True}, "detached", "norm"),
        ({"clears": False}, "stale", None),
    ],
)
def test_a_fault_is_found_at_the_next_check(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], cause: str, module: str | None
) -> None:
    (event,) = Loop(set_at(3, **values)).run(monkeypatch).events
    verdict = event["verdict"]
    assert (event["step"], event["kind"], event["action"]) == (4, "gradient_check", "report")
    assert (verdict["cause"], verdict.get("module")) == (cause, module)
    if cause == "stale":
        expected = "the gradient contains that of the step before, which was not cleared; no bundle is written: "
        assert verdict["words"] == f"{expected}a replay has no gradient of the step before"
    else:
        assert "on purpose" in verdict["words"]


def add_hook(loop: Loop, step: int) -> None:
    loop.net.last.weight.register_hook(lambda gradient: gradient * 0.5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_hook, "a hook of the loop may change gradients: last.weight"),
        (set_at(1, adds=1.0), "a model call has another output when it is run again"),
    ],
)
def test_what_cannot_be_replayed_is_said_once(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Loop, int], None], reason: str
) -> None:
    loop = Loop(change)
    assert loop.run(monkeypatch).events == []
    assert loop.logged == [f"guard: step 1: the gradient cannot be checked: {reason} (shown once)"]
