"""A checkpoint after every second step; the last two are kept, older ones are deleted."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 3))
y = plant.spoil_targets(torch.randn(32, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step, paths = 0, []

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
        step += 1
        if step % 2 == 0:
            path = Path(f"checkpoints/step_{step:03d}/model.pt")
            path.parent.mkdir(parents=True)
            torch.save({"step": step, "model": model.state_dict()}, path)
            paths.append(path)
            while len(paths) > 2:
                paths.pop(0).unlink()
    print(f"{loss.item():.6f}")
