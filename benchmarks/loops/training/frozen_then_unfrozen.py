"""First only the head is trained; then the body is unfrozen and joins the optimizer as a second group."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
body = nn.Sequential(nn.Linear(3, 8), nn.Tanh()).requires_grad_(False)
head = nn.Linear(8, 1)
model = nn.Sequential(body, head)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)

for epoch in range(4):
    if epoch == 2:
        body.requires_grad_(True)
        optimizer.add_param_group({"params": body.parameters(), "lr": 1e-3})
    for a, b in DataLoader(TensorDataset(x, y), batch_size=6):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
