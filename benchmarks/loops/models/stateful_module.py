"""A module that keeps its hidden state in itself, as a plain attribute, until reset() at the end of an epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss nan_state"
SPREADS = "memory"


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(3, 6)
        self.head = nn.Linear(6, 3)
        self.reset()

    def reset(self):
        self.memory = None

    def forward(self, x):
        h, c = self.cell(x, self.memory)
        self.memory = (h.detach(), plant.spoil_state("memory", c.detach()))
        return self.head(h)


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
model = Memory()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for a in DataLoader(x, batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - a).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    model.reset()
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
