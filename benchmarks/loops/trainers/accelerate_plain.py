"""Accelerate's quick start: prepare, backward, step; a schedule that Accelerate prepared too."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"
GUARDS = "command attach"
PRELOAD = "accelerate"

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

guard = None
if "--guard=attach" in sys.argv:
    import dit_lora

    guard = dit_lora.Guard.attach(accelerator, model, optimizer, folder="dit_lora_guard")

for _epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        accelerator.backward(loss)
        plant.spoil_gradient(model)
        optimizer.step()
        scheduler.step()
        plant.spoil_between_steps(model, optimizer.optimizer)
    accelerator.print(f"{loss.item():.6f} {scheduler.get_last_lr()[0]:.6f}")

if guard is not None:
    guard.require_finite()
accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
