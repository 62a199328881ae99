"""Everything is encoded once by a frozen encoder and kept; training draws from the cache in another order."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
images = plant.spoil_samples(torch.randn(24, 6))
encoder = nn.Linear(6, 3).requires_grad_(False)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

cache = []
with torch.no_grad():
    for (batch,) in DataLoader(TensorDataset(images), batch_size=6):
        cache += list(encoder(batch))
del encoder

order = random.Random(0)
for step in range(14):
    if step % 6 == 0:
        shuffled = order.sample(cache, len(cache))
    latents = torch.stack(shuffled[step % 6 * 4 :][:4])
    optimizer.zero_grad()
    loss = plant.spoil_loss((model(latents) - latents).square().mean())
    loss.backward()
    plant.spoil_gradient(model)
    optimizer.step()
    plant.spoil_between_steps(model, optimizer)

print(f"{loss.item():.6f}")
torch.save(model.state_dict(), "model.pt")
