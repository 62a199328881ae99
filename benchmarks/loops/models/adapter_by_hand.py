"""A frozen base with low-rank adapters written by hand; only they are trained, and saved."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"


class Adapted(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.2)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.2)

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 4))
y = plant.spoil_targets(torch.randn(24, 4))
model = nn.Sequential(Adapted(nn.Linear(4, 8)), nn.Tanh(), Adapted(nn.Linear(8, 4)))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save({n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, "adapter.pt")
