"""Mixup: each row is mixed with another row of the batch, so that one bad sample is in two rows."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
beta = torch.distributions.Beta(0.4, 0.4)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True):
        share = beta.sample()
        order = torch.randperm(len(a))
        mixed = share * a + (1 - share) * a[order]
        prediction = model(mixed)
        loss = share * (prediction - b).square().mean()
        loss = loss + (1 - share) * (prediction - b[order]).square().mean()
        optimizer.zero_grad()
        plant.spoil_loss(loss).backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
