"""clip_grad_value_ hides an Inf (it becomes the limit) but not a NaN; several updates on each batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"
SURVIVES = "inf_gradient"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)

for a, b in DataLoader(TensorDataset(x, y), batch_size=6):
    for _ in range(3):
        optimizer.zero_grad()
        plant.spoil_loss((model(a) - b).square().mean()).backward()
        plant.spoil_gradient(model)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)

print(model(x[:2]).detach().flatten().tolist())
torch.save(model.state_dict(), "model.pt")
