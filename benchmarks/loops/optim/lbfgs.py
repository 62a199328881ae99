"""L-BFGS, whose step calls the closure several times, with a line search."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target nan_weight nan_loss"
SURVIVES = "nan_loss"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn="strong_wolfe")

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):

        def closure():
            optimizer.zero_grad()
            loss = (model(a) - b).square().mean()  # noqa: B023
            loss = plant.spoil_loss(loss)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
