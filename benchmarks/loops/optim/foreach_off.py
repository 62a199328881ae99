"""Adam with amsgrad and without foreach; gradients are kept as tensors of zeros between steps."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target huge_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False, amsgrad=True)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad(set_to_none=False)
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
