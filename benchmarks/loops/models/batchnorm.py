"""BatchNorm in the model: one bad sample spoils the whole batch's output, and the running statistics."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"
SPREADS = "running_mean running_var"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(26, 3))
y = plant.spoil_targets(torch.randn(26, 1))
model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for epoch in range(2):
    model.train()
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4, drop_last=True):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    model.eval()
    with torch.no_grad():
        print(f"epoch {epoch}: {(model(x[8:]) - y[8:]).square().mean().item():.5f}")

torch.save(model.state_dict(), "model.pt")
