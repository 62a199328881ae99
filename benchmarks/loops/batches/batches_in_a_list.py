"""All batches are read into a list once, which is then walked backwards, shuffled, and forwards again."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan replay_oom"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = plant.limit_calls(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = list(DataLoader(TensorDataset(x, y), batch_size=4))
shuffled = random.Random(0).sample(batches, len(batches))

for order in (list(reversed(batches)), shuffled, batches):
    for a, b in order:
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
