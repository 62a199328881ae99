"""Batches are converted, scaled and normalised in the loop: (x * 2 - mean) / std."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"

device = torch.device("cpu")
torch.manual_seed(0)
x = plant.spoil_samples(torch.rand(24, 3, dtype=torch.float64))
y = plant.spoil_targets(torch.randn(24, 1))
mean, std = torch.tensor([0.9, 1.0, 1.1]), torch.tensor([0.5, 0.6, 0.7])
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True):
        a = a.to(device, torch.float32, non_blocking=True)
        a = (a * 2 - mean) / std
        b = b.to(device)
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
