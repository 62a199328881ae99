"""OneCycleLR, which also moves betas, stepped after every batch."""

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(x, y), batch_size=4)
scheduler = OneCycleLR(optimizer, max_lr=1e-2, epochs=2, steps_per_epoch=len(loader))

for _epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        scheduler.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{scheduler.get_last_lr()[0]:.6f}")

state = {"model": model.state_dict(), "scheduler": scheduler.last_epoch}
torch.save(state, "checkpoint.pt")
