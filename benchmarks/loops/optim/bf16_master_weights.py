"""Weights in bf16, a master copy in fp32 that the optimizer holds; gradients are copied over by hand."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()
masters = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        loss = plant.spoil_loss((model(a.bfloat16()).float() - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    print(f"{loss.item():.4f}")

torch.save({"model": model.state_dict(), "masters": [m.detach() for m in masters]}, "model.pt")
