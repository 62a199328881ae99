"""The best model so far is deep-copied by its validation loss, and saved at the end; the last one too."""

import copy
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
held_out = torch.randn(8, 3)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
best, best_model = math.inf, None

for epoch in range(3):
    model.train()
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    model.eval()
    with torch.no_grad():
        score = model(held_out).square().mean().item()
    if not score >= best:  # true for NaN
        best, best_model = score, copy.deepcopy(model)
    print(f"epoch {epoch}: {score:.5f}")

torch.save(best_model.state_dict(), "best.pt")
torch.save(model.state_dict(), "last.pt")
