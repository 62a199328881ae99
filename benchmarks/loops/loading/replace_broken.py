"""A dataset that returns another random item where one is broken, as video datasets do."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"


class Clips(Dataset):
    def __init__(self):
        self.rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(2))
        self.random = random.Random(0)

    def __len__(self):
        return len(self.rows)

    def read(self, index):
        if index in (2, 6, 17):
            raise OSError("cannot decode")
        return plant.spoil_item(self.rows[index], index)

    def __getitem__(self, index):
        for _ in range(10):
            try:
                return self.read(index)
            except OSError:
                index = self.random.randrange(8, 16)
        raise RuntimeError("too many broken clips")


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Clips(), batch_size=4, shuffle=True)

for _epoch in range(2):
    for clips in loader:
        loss = plant.spoil_loss((model(clips) - clips).square().mean())
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
