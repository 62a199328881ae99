"""Stochastic weight averaging: AveragedModel and SWALR from half of the training on, then update_bn."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"

torch.manual_seed(0)
x = torch.randn(24, 3)
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
loader = DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True)
swa_model, swa_scheduler = AveragedModel(model), None

for epoch in range(4):
    for a, b in loader:
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    if epoch >= 2:
        if swa_scheduler is None:
            swa_scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=1)
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print(f"epoch {epoch}: lr {optimizer.param_groups[0]['lr']:.5f}")

update_bn(loader, swa_model)
torch.save(swa_model.state_dict(), "swa.pt")
torch.save(model.state_dict(), "model.pt")
