"""A GradScaler with accumulation and unscale_ before clipping, as language model trainers have it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_weight"
SURVIVES = "nan_sample nan_target inf_gradient nan_loss"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 6))
y = plant.spoil_targets(torch.randn(32, 2))
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
accumulate = 2

for _epoch in range(2):
    for step, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=4), 1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.l1_loss(model(a), b) / accumulate
        scaler.scale(plant.spoil_loss(loss)).backward()
        if step % accumulate == 0:
            plant.spoil_gradient(model)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            plant.spoil_between_steps(model, optimizer)

print("scale", scaler.get_scale())
torch.save(model.state_dict(), "model.pt")
