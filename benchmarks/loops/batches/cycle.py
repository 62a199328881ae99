"""itertools.cycle over a loader: from the second round on, batches come from the cycle's memory."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(16, 3))
y = plant.spoil_targets(torch.randn(16, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = itertools.cycle(DataLoader(TensorDataset(x, y), batch_size=4))

for _step in range(14):
    a, b = next(batches)
    optimizer.zero_grad()
    loss = plant.spoil_loss((model(a) - b).square().mean())
    loss.backward()
    plant.spoil_gradient(model)
    optimizer.step()
    plant.spoil_between_steps(model, optimizer)

print(f"{loss.item():.6f}")
torch.save(model.state_dict(), "model.pt")
