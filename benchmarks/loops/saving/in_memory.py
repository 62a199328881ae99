"""A checkpoint is written to memory with torch.save, and its bytes to a file; a rollback reads it back."""

import io

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
start = io.BytesIO()
torch.save(model.state_dict(), start)

for epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    if epoch == 0:  # start again, with another order of the data
        start.seek(0)
        model.load_state_dict(torch.load(start))
    print(f"{loss.item():.6f}")

buffer = io.BytesIO()
torch.save(model.state_dict(), buffer)
with open("model.pt", "wb") as file:
    file.write(buffer.getvalue())
