"""Gradients of four micro-batches are accumulated before each step, with the remainder of the epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss replay_oom late_nan"

ACCUMULATE = 4

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(36, 3))
y = plant.spoil_targets(torch.randn(36, 1))
model = plant.limit_calls(nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=2)

optimizer.zero_grad()
for _epoch in range(2):
    for i, (a, b) in enumerate(loader):
        loss = nn.functional.mse_loss(model(a), b) / ACCUMULATE
        plant.spoil_loss(loss).backward()
        if (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader):
            plant.spoil_gradient(model)
            optimizer.step()
            optimizer.zero_grad()
            plant.spoil_between_steps(model, optimizer)

print(sum(p.double().sum().item() for p in model.parameters()))
torch.save(model.state_dict(), "model.pt")
