"""PEFT's LoRA on a small module, saved with save_pretrained."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"
PRELOAD = "peft"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 4))
y = plant.spoil_targets(torch.randn(24, 4))
base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
config = LoraConfig(r=2, lora_alpha=4, target_modules=["0", "2"], init_lora_weights=False)
model = get_peft_model(base, config)
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

model.save_pretrained("adapter")
