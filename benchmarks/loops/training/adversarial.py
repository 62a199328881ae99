"""Adversarial training: the input's gradient makes the batch that is trained on."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 4))
y = torch.randint(0, 3, (24,))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        attacked = a.clone().requires_grad_(True)
        F.cross_entropy(model(attacked), b).backward()
        a = (a + 0.05 * attacked.grad.sign()).detach()
        optimizer.zero_grad()
        loss = plant.spoil_loss(F.cross_entropy(model(a), b))
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
