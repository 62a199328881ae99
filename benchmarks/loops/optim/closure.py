"""SGD with a closure: forward and backward happen inside step()."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"
GUARDS = "command watch"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

if "--guard=watch" in sys.argv:
    import dit_lora

    dit_lora.Guard.watch(model, optimizer, folder="dit_lora_guard")

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):

        def closure(a=a, b=b):
            optimizer.zero_grad()
            loss = plant.spoil_loss((model(a) - b).square().mean())
            loss.backward()
            plant.spoil_gradient(model)
            return loss

        loss = optimizer.step(closure)
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
