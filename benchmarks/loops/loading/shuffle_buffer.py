"""A stream with a buffer of eight samples from which the next is drawn, batched by hand."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(4)
        for number in range(24):
            yield {"x": plant.spoil_item(torch.randn(3, generator=generator), number), "n": number}


class Shuffled(IterableDataset):
    def __init__(self, stream, size, seed):
        self.stream = stream
        self.size = size
        self.random = random.Random(seed)

    def __iter__(self):
        buffer = []
        for item in self.stream:
            buffer.append(item)
            if len(buffer) == self.size:
                yield buffer.pop(self.random.randrange(len(buffer)))
        self.random.shuffle(buffer)
        yield from buffer


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Shuffled(Stream(), 8, 0), batch_size=4)

for _epoch in range(2):
    for batch in loader:
        x = batch["x"]
        loss = plant.spoil_loss((model(x) - x).square().mean())
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(batch["n"].tolist(), f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
