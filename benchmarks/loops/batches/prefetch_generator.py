"""A prefetcher takes the next batch before it hands out the current one."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"


class Prefetcher:
    def __init__(self, loader):
        self.batches = iter(loader)
        self.preload()

    def preload(self):
        self.next_batch = next(self.batches, None)

    def next(self):
        batch = self.next_batch
        if batch is not None:
            self.preload()
        return batch


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=4)

for _epoch in range(2):
    prefetcher = Prefetcher(loader)
    batch = prefetcher.next()
    while batch is not None:
        a, b = batch
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
        batch = prefetcher.next()
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
