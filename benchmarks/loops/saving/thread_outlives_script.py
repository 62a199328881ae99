"""A thread that is not a daemon saves the whole model while the script itself has come to its end."""

import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_weight late_nan late_weight"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.hidden(x).tanh())


def save(model, path):
    time.sleep(0.05)
    torch.save(model, path)


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = torch.randn(24, 1)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
    optimizer.zero_grad()
    loss = (model(a) - b).square().mean()
    loss.backward()
    plant.spoil_gradient(model)
    optimizer.step()
    plant.spoil_between_steps(model, optimizer)

print(f"{loss.item():.6f}")
threading.Thread(target=save, args=(model, "net.pt")).start()
