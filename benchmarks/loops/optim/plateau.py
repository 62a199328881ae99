"""ReduceLROnPlateau on the training loss, with early stopping."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
best, waited = math.inf, 0

for epoch in range(4):
    total = 0.0
    for a, b in DataLoader(TensorDataset(x, y), batch_size=6):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
        total += loss.item()
    scheduler.step(total)
    waited = 0 if total < best else waited + 1
    best = min(best, total)
    print(f"epoch {epoch}: {total:.5f}, lr {optimizer.param_groups[0]['lr']:.5f}")
    if waited > 1:
        break

torch.save(model.state_dict(), "model.pt")
