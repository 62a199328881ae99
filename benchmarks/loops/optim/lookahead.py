"""Lookahead by hand: every third step the slow weights follow, and the fast ones go back to them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
slow = [p.detach().clone() for p in model.parameters()]
step = 0

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
        step += 1
        if step % 3 == 0:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters(), strict=True):
                    s.add_(p - s, alpha=0.5)
                    p.copy_(s)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
