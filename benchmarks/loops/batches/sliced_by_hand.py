"""No DataLoader: torch.randperm, and slices of the data."""

import torch
from torch import nn

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)

for _epoch in range(2):
    order = torch.randperm(len(x))
    for i in range(0, len(x), 4):
        rows = order[i : i + 4]
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(x[rows]) - y[rows]).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
