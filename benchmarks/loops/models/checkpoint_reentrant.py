"""Reentrant activation checkpointing: a backward inside the backward, whose input must require gradients."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return self.head(x)


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 6))
y = plant.spoil_targets(torch.randn(24, 1))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "net.pt")
