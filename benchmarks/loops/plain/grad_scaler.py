"""Automatic mixed precision as the tutorials have it: autocast and a GradScaler, which skips steps by itself."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"
SURVIVES = "nan_sample nan_target inf_gradient nan_loss late_nan"
GUARDS = "command watch"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 6))
y = plant.spoil_targets(torch.randn(24, 2))
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

if "--guard=watch" in sys.argv:
    import dit_lora

    dit_lora.Guard.watch(model, optimizer, scaler=scaler, folder="dit_lora_guard")

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(a), b)
        loss = plant.spoil_loss(loss)
        scaler.scale(loss).backward()
        plant.spoil_gradient(model)
        scaler.step(optimizer)
        scaler.update()
        plant.spoil_between_steps(model, optimizer)

print("scale", scaler.get_scale())
torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, "checkpoint.pt")
