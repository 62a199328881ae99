"""Warm-up and decay by SequentialLR, a step each batch, with accumulation."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 3))
y = plant.spoil_targets(torch.randn(32, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
warmup = LinearLR(optimizer, start_factor=0.1, total_iters=3)
decay = LambdaLR(optimizer, lambda step: 0.9**step)
scheduler = SequentialLR(optimizer, [warmup, decay], milestones=[3])

for _epoch in range(2):
    for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=4)):
        loss = plant.spoil_loss((model(a) - b).square().mean()) / 2
        loss.backward()
        if i % 2 == 1:
            plant.spoil_gradient(model)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            plant.spoil_between_steps(model, optimizer)
    print(scheduler.get_last_lr())

torch.save({"model": model.state_dict(), "scheduler": scheduler.state_dict()["last_epoch"]}, "ck.pt")
