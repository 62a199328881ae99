"""A generator restarts the loader for ever; the loop takes as many batches as it has steps."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_loss late_nan late_weight"


def forever(loader):
    while True:
        yield from loader


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(20, 3))
y = plant.spoil_targets(torch.randn(20, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = forever(DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True))

for _step in range(13):
    total = 0.0
    optimizer.zero_grad()
    for _ in range(2):  # micro-batches
        a, b = next(data)
        loss = plant.spoil_loss((model(a) - b).square().mean()) / 2
        loss.backward()
        total += loss.item()
    plant.spoil_gradient(model)
    optimizer.step()
    plant.spoil_between_steps(model, optimizer)

print(f"{total:.6f}")
torch.save(model.state_dict(), "model.pt")
