"""Autocast to bf16 on the CPU, fp32 weights, no scaler."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 6))
y = plant.spoil_targets(torch.randn(24, 2))
model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            prediction = model(a)
            loss = nn.functional.mse_loss(prediction.float(), b)
        loss = plant.spoil_loss(loss)
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.5f}")

torch.save(model.state_dict(), "model.pt")
