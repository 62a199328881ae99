"""Accumulation over micro-batches from which a filter takes rows; a loss weighted by the rows that are left."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_loss empty_batch late_nan"
SURVIVES = "empty_batch"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 3))
y = plant.spoil_targets(torch.randn(32, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
        keep = b[:, 0] != 0
        a, b = plant.drop_rows(a[keep], b[keep])
        loss = nn.functional.mse_loss(model(a), b) * len(a) / 8
        plant.spoil_loss(loss).backward()
        if i % 2:
            plant.spoil_gradient(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
