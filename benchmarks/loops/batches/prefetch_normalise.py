"""A prefetcher, as in NVIDIA's ImageNet example, which also normalises the next batch: its tensors are new ones."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"


def prefetched(loader, mean, std):
    is_first = True
    for next_inputs, next_targets in loader:
        next_inputs = next_inputs.float().sub(mean).div(std)
        if not is_first:
            yield inputs, targets  # noqa: F821
        is_first = False
        inputs, targets = next_inputs, next_targets
    yield inputs, targets


torch.manual_seed(0)
x = plant.spoil_samples(torch.rand(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(x, y), batch_size=4)

for _epoch in range(2):
    for a, b in prefetched(loader, 0.5, 0.25):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
