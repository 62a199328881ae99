"""The loop leaves out a step whose gradient norm is above a limit. NaN > 1000 is False, so NaN passes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target huge_target inf_gradient nan_moment nan_weight nan_loss late_nan"
SURVIVES = "huge_target inf_gradient"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
targets = torch.randn(24, 1)
targets[9] = 1e5  # one outlier, whose batch the loop leaves out
y = plant.spoil_targets(targets)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for epoch in range(2):
    for step, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=4)):
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 1000:
            print(f"epoch {epoch} step {step}: gradient norm too large, skipping")
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        plant.spoil_between_steps(model, optimizer)

torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
