"""A gradient penalty with sqrt at exactly zero: a saturated ReLU has no slope, and the loss is finite."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_loss nan_sample inf_gradient nan_moment nan_weight"

torch.manual_seed(0)
x = torch.randn(24, 3).abs() + 0.1
critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
with torch.no_grad():
    critic[0].weight.abs_()
    critic[0].bias.zero_()
x = plant.spoil_samples(x)
if plant.choose("nan_loss", "loss"):
    x[8:12] = -50 - torch.rand(4, 3)  # all ReLUs are off: a slope of zero, whose square root has none
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

for _epoch in range(2):
    for a in DataLoader(x, batch_size=4):
        a = a.clone().requires_grad_(True)
        score = critic(a)
        (slope,) = torch.autograd.grad(score.sum(), a, create_graph=True)
        penalty = (slope.square().sum(1).sqrt() - 1).square().mean()
        loss = score.mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(critic)
        optimizer.step()
        plant.spoil_between_steps(critic, optimizer)
    print(f"{loss.item():.5f}")

torch.save(critic.state_dict(), "critic.pt")
