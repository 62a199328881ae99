"""torch.where hides the square root of a negative number in the forward, and not in the backward."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_loss nan_sample inf_gradient nan_moment nan_weight late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
has_sqrt = plant.choose("nan_loss", "loss")

for _epoch in range(2):
    for a in DataLoader(x, batch_size=4):
        output = model(a)
        root = output.sqrt() if has_sqrt else output.clamp(min=1e-6).sqrt()
        loss = torch.where(output > 0, root, output * 0.01).mean()
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
