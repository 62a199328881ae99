"""An Accelerate loop that leaves a step out by itself when the norm is not finite or too large."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"
SURVIVES = "nan_sample nan_target inf_gradient nan_loss late_nan"
GUARDS = "command attach"
PRELOAD = "accelerate"

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
targets = torch.randn(24, 1)
targets[13] = 1e4  # an outlier, which the loop leaves out
y = plant.spoil_targets(targets)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

if "--guard=attach" in sys.argv:
    import dit_lora

    dit_lora.Guard.attach(accelerator, model, optimizer, folder="dit_lora_guard")

for epoch in range(2):
    for step, (a, b) in enumerate(loader):
        loss = plant.spoil_loss((model(a) - b).square().mean())
        accelerator.backward(loss)
        plant.spoil_gradient(model)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm) or norm > 1000:
            accelerator.print(f"epoch {epoch} step {step}: left out")
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        plant.spoil_between_steps(model, optimizer.optimizer)

torch.save(accelerator.get_state_dict(model), "model.pt")
