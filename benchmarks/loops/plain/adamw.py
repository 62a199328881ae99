"""The quick start of PyTorch: batches, loss, backward, step; the state dict is saved at the end."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target huge_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"
GUARDS = "command watch"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=4)

if "--guard=watch" in sys.argv:
    import dit_lora

    dit_lora.Guard.watch(model, optimizer, loader=loader, folder="dit_lora_guard")

for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss = plant.spoil_loss(loss)
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"epoch {epoch}: loss {loss.item():.6f}")

torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
