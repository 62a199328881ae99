"""ConcatDataset of three parts, shuffled; the bad sample lies in the second part."""

import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 3), index=14)
y = torch.randn(32, 1)
parts = [TensorDataset(x[i:j], y[i:j]) for i, j in ((0, 10), (10, 20), (20, 32))]
data = ConcatDataset(parts)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(data, batch_size=4, shuffle=True):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
