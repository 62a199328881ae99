"""The loader gives batches of eight, which the loop cuts into micro-batches of two with chunk()."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 3))
y = plant.spoil_targets(torch.randn(32, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for batch, targets in DataLoader(TensorDataset(x, y), batch_size=8):
        optimizer.zero_grad()
        for a, b in zip(batch.chunk(4), targets.chunk(4), strict=True):
            loss = plant.spoil_loss((model(a) - b).square().mean()) / 4
            loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
