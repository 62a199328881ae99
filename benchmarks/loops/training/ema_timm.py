"""An average like timm's ModelEmaV2: a deep copy as .module, updated from the whole state dict, and saved."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    def update(self, model):
        with torch.no_grad():
            ours, theirs = self.module.state_dict().values(), model.state_dict().values()
            for e, m in zip(ours, theirs, strict=True):
                e.copy_(self.decay * e + (1.0 - self.decay) * m)


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model_ema = ModelEma(model)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
        model_ema.update(model)
    print(f"{(model_ema.module(x) - y).square().mean().item() < 1e9}")

torch.save(model.state_dict(), "model.pt")
torch.save(model_ema.module.state_dict(), "ema.pt")
