"""An exponential average of the weights in a dict of tensors, by lerp_; saved with the model."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss nan_state late_nan late_weight"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ema = {name: p.detach().clone() for name, p in model.named_parameters()}

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                ema[name].lerp_(p, 0.1)
        plant.spoil_between_steps(model, optimizer)
        plant.spoil_state("0.weight", ema["0.weight"])
    print(f"{loss.item():.6f}")

torch.save({"model": model.state_dict(), "ema": ema}, "checkpoint.pt")
