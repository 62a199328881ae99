"""Rows that do not pass a filter are left out in the loop; now and then none is left."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_loss empty_batch late_nan"
SURVIVES = "empty_batch"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3).abs())
y = plant.spoil_targets(torch.randn(24, 1))
x[::7] *= -1
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        keep = a[:, 1] >= 0
        a, b = plant.drop_rows(a[keep], b[keep])
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(len(a), f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
