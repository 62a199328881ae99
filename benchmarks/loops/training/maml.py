"""MAML: an inner step whose gradient is differentiated again, with functional_call."""

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 3))
y = plant.spoil_targets(torch.randn(32, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        support, query = (a[:4], b[:4]), (a[4:], b[4:])
        weights = dict(model.named_parameters())
        inner = nn.functional.mse_loss(functional_call(model, weights, support[0]), support[1])
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
        outer = nn.functional.mse_loss(functional_call(model, fast, query[0]), query[1])
        optimizer.zero_grad()
        plant.spoil_loss(outer).backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{outer.item():.6f}")

torch.save(model.state_dict(), "model.pt")
