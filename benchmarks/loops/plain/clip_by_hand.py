"""Clipping written by hand: the norm of all gradients, then a factor on each."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        plant.spoil_loss((model(a) - b).square().mean()).backward()
        plant.spoil_gradient(model)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(factor)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{norm.item():.5f}")

torch.save(model.state_dict(), "model.pt")
