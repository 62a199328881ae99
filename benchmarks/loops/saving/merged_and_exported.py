"""At the end weights are scaled and merged into a new module, traced, and saved with torch.jit as well."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_weight late_nan late_weight"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = torch.randn(24, 1)
model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = (model(a) - b).square().mean()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

merged = nn.Linear(3, 1)
with torch.no_grad():
    merged.weight.copy_(model[1].weight @ model[0].weight)
    merged.bias.copy_(model[1].weight @ model[0].bias + model[1].bias)
torch.save(merged.state_dict(), "merged.pt")
torch.save(copy.deepcopy(model).requires_grad_(False), "whole.pt")
torch.jit.save(torch.jit.trace(model.eval(), torch.ones(2, 3)), "traced.jit")
