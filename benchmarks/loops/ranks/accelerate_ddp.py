"""Accelerate on two gloo ranks: accumulate, a loss gathered over ranks, and save by the main process."""

import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_weight late_nan"
PRELOAD = "accelerate"
RANKS = 2

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 3))
y = plant.spoil_targets(torch.randn(32, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _epoch in range(2):
    for a, b in loader:
        with accelerator.accumulate(model):
            loss = (model(a) - b).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                plant.spoil_gradient(model)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            plant.spoil_between_steps(model, optimizer.optimizer)
    accelerator.print(f"{accelerator.gather(loss.detach()).mean().item():.6f}")

accelerator.wait_for_everyone()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
accelerator.wait_for_everyone()
time.sleep(0.1)  # gloo may deadlock in its destructor while it still holds tensors
accelerator.end_training()
