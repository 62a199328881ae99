"""An IterableDataset: samples have no index."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(4)
        for number in range(24):
            yield plant.spoil_item(torch.randn(3, generator=generator), number)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for x in DataLoader(Stream(), batch_size=4):
        loss = plant.spoil_loss((model(x) - x).square().mean())
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
