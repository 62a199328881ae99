"""A hand-written schedule-free optimizer with train() and eval() modes that move the weights."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"


class ScheduleFreeSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "is_training": True})

    @torch.no_grad()
    def swap(self, is_training):
        for group in self.param_groups:
            if group["is_training"] == is_training:
                continue
            factor = 1 - 1 / group["beta"] if group["is_training"] else 1 - group["beta"]
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], factor)
            group["is_training"] = is_training

    def train(self):
        self.swap(True)

    def eval(self):
        self.swap(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            share = 1 / group["k"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "z" not in self.state[p]:
                    self.state[p]["z"] = p.clone()
                z = self.state[p]["z"]
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = ScheduleFreeSGD(model.parameters(), lr=0.05)

for epoch in range(2):
    model.train()
    optimizer.train()
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    model.eval()
    optimizer.eval()
    with torch.no_grad():
        print(f"epoch {epoch}: {(model(x[8:]) - y[8:]).square().mean().item():.6f}")

torch.save(model.state_dict(), "model.pt")
