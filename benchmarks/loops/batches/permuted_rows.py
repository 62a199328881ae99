"""Rows of the batch are permuted in the loop: mixup's partner is x[perm], then a roll, then a flip."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(7)

for epoch in range(3):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        if epoch == 0:
            order = torch.randperm(len(a), generator=generator)
            a, b = a[order], b[order]
        elif epoch == 1:
            a, b = a.roll(1, 0), b.roll(1, 0)
        else:
            a, b = a.flip(0), b.flip(0)
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
