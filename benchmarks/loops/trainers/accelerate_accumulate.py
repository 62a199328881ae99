"""Accelerate with accumulate(), clipping where gradients are synchronised, zero_grad after the step."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_weight replay_oom"
GUARDS = "command attach"
PRELOAD = "accelerate"

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 3))
y = plant.spoil_targets(torch.randn(32, 1))
model = plant.limit_calls(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

if "--guard=attach" in sys.argv:
    import dit_lora

    dit_lora.Guard.attach(accelerator, model, optimizer, folder="dit_lora_guard")

for _epoch in range(2):
    for a, b in loader:
        with accelerator.accumulate(model):
            loss = plant.spoil_loss((model(a) - b).square().mean())
            accelerator.backward(loss)
            plant.spoil_gradient(model)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        plant.spoil_between_steps(model, optimizer.optimizer)
    accelerator.print(f"{loss.item():.6f}")

accelerator.wait_for_everyone()
accelerator.save_model(model, "model")
