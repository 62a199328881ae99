"""Gradients are clipped after every micro-batch, as in per-microbatch differentially private training."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 3))
y = plant.spoil_targets(torch.randn(32, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=False)

for _epoch in range(2):
    for i, (a, b) in enumerate(loader):
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
            plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
