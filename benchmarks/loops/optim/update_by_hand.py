"""An optimizer for the head; the body's weights are updated by hand, with p -= lr * p.grad."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target nan_moment nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
body = nn.Linear(3, 8)
head = nn.Sequential(nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        loss = plant.spoil_loss((head(body(a)) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(head)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in body.parameters():
                p -= 0.01 * p.grad
                p.grad = None
        plant.spoil_between_steps(head, optimizer)
    print(f"{loss.item():.6f}")

torch.save({"body": body.state_dict(), "head": head.state_dict()}, "model.pt")
