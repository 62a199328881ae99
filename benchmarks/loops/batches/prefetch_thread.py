"""A thread reads the loader ahead into a queue of three batches."""

import queue
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"


def background(loader, size=3):
    batches = queue.Queue(maxsize=size)

    def read():
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := batches.get()) is not None:
        yield batch


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=4)

for _epoch in range(2):
    for a, b in background(loader):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
