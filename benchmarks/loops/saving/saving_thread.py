"""Checkpoints are written by a thread, from copies that the loop makes."""

import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
threads = []

for epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    snapshot = {name: value.detach().clone() for name, value in model.state_dict().items()}
    thread = threading.Thread(target=torch.save, args=(snapshot, f"epoch_{epoch}.pt"))
    thread.start()
    threads.append(thread)
    print(f"{loss.item():.6f}")

for thread in threads:
    thread.join()
