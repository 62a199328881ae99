"""The loop checks every gradient by itself, sets those that are not finite to zero, and steps."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight late_nan late_weight"
SURVIVES = "nan_sample nan_target inf_gradient late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        (model(a) - b).square().mean().backward()
        plant.spoil_gradient(model)
        for p in model.parameters():
            if not p.grad.isfinite().all():
                p.grad = torch.nan_to_num(p.grad, nan=0.0, posinf=0.0, neginf=0.0)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)

print([round(p.abs().sum().item(), 5) for p in model.parameters()])
torch.save(model.state_dict(), "model.pt")
