"""An optimizer of one's own with a bound for each element that begins at infinity, and a group without a limit."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_weight nan_loss late_nan"
GUARDS = "command watch"
INFINITE = "state/0/bound state/1/bound state/2/bound state/3/bound"


class Bounded(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "max_norm": float("inf")})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["bound"] = torch.full_like(p, float("inf"))
                state["mean"].mul_(0.9).add_(p.grad)
                p.sub_(torch.minimum(group["lr"] * state["mean"], state["bound"]))


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(120, 3))
y = plant.spoil_targets(torch.randn(120, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = Bounded(model.parameters(), lr=1e-3)

guard = None
if "--guard=watch" in sys.argv:
    import dit_lora

    guard = dit_lora.Guard.watch(model, optimizer, folder="dit_lora_guard")

for _epoch in range(4):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

if guard is not None:
    guard.require_finite()
torch.save(model.state_dict(), "model.pt")
torch.save(optimizer.state_dict(), "optimizer.pt")
