"""Two optimizers on one model: SGD for the embedding's part, AdamW for the rest, one backward."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan replay_oom"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = plant.limit_calls(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
sgd = torch.optim.SGD(model[0].parameters(), lr=1e-2, momentum=0.9)
adamw = torch.optim.AdamW(model[2].parameters(), lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        sgd.step()
        adamw.step()
        sgd.zero_grad()
        adamw.zero_grad()
        plant.spoil_between_steps(model, sgd)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
