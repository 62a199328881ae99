"""A hand-written batch sampler groups sequences by length and shuffles the batches; the collate pads."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"


class Buckets:
    def __init__(self, lengths, batch_size, seed):
        self.lengths = lengths
        self.batch_size = batch_size
        self.random = random.Random(seed)

    def __len__(self):
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], i))
        size = self.batch_size
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        self.random.shuffle(batches)
        yield from batches


def collate(rows):
    longest = max(len(row) for row in rows)
    x = torch.zeros(len(rows), longest, 4)
    mask = torch.zeros(len(rows), longest)
    for i, row in enumerate(rows):
        x[i, : len(row)] = row
        mask[i, : len(row)] = 1
    return x, mask


torch.manual_seed(0)
lengths = [random.Random(i).randint(2, 9) for i in range(18)]
data = plant.spoil_samples([torch.randn(n, 4) for n in lengths])
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_sampler=Buckets(lengths, 4, seed=1), collate_fn=collate)

for _epoch in range(3):
    for x, mask in loader:
        optimizer.zero_grad()
        error = (model(x) - x).square().mean(-1)
        loss = plant.spoil_loss((error * mask).sum() / mask.sum())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
