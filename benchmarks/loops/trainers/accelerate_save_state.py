"""accelerator.save_state every epoch, and load_state at the start of the next, with an own EMA registered for it."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"
PRELOAD = "accelerate"


class Average:
    def __init__(self, model):
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model):
        with torch.no_grad():
            for name, p in model.named_parameters():
                self.values[name].mul_(0.9).add_(p, alpha=0.1)

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        self.values = values


accelerator = Accelerator(cpu=True)
set_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
average = Average(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(average)

for epoch in range(2):
    if epoch:
        accelerator.load_state("state")
    for a, b in loader:
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        accelerator.backward(loss)
        plant.spoil_gradient(model)
        optimizer.step()
        average.update(model)
        plant.spoil_between_steps(model, optimizer.optimizer)
    accelerator.save_state("state")
    accelerator.print(f"{loss.item():.6f}")
