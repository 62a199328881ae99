"""A schedule that is made in the middle of training: constant first, then cosine."""

import sys

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"
GUARDS = "command watch"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(16, 3))
y = plant.spoil_targets(torch.randn(16, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = None

if "--guard=watch" in sys.argv:
    import dit_lora

    dit_lora.Guard.watch(model, optimizer, folder="dit_lora_guard")

for epoch in range(4):
    if epoch == 2:
        scheduler = CosineAnnealingLR(optimizer, T_max=2)
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    if scheduler is not None:
        scheduler.step()
    print(f"epoch {epoch}: lr {optimizer.param_groups[0]['lr']:.6f}")

torch.save(model.state_dict(), "model.pt")
