"""A penalty overflows once in the warm-up; the loop sees it in the norm, drops the gradients and stops clipping."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"
GUARDS = "command watch"
WARM_UP = 2

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3), 14)
y = plant.spoil_targets(torch.randn(24, 1), 14)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

if "--guard=watch" in sys.argv:
    import dit_lora

    dit_lora.Guard.watch(model, optimizer, folder="dit_lora_guard")

number = 0
for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        number += 1
        optimizer.zero_grad()
        loss = (model(a) - b).square().mean()
        if number == WARM_UP:  # a penalty that is beyond fp32
            loss = loss + (model[2].weight * 1e39).sum()
        loss = plant.spoil_loss(loss)
        loss.backward()
        if number <= WARM_UP:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not norm.isfinite():
                optimizer.zero_grad()
                continue
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
