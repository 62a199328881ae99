"""random_split into training and validation data, an evaluation under no_grad after each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(30, 3), index=11)
y = plant.spoil_targets(torch.randn(30, 1), index=11)
training, validation = random_split(TensorDataset(x, y), [0.8, 0.2], generator=torch.Generator().manual_seed(4))
assert 11 in training.indices
model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for epoch in range(2):
    model.train()
    for a, b in DataLoader(training, batch_size=4, shuffle=True):
        optimizer.zero_grad()
        loss = plant.spoil_loss(nn.functional.mse_loss(model(a), b))
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(a), b) for a, b in DataLoader(validation, batch_size=6)]
    print(f"epoch {epoch}: validation loss {torch.stack(losses).mean().item():.5f}")

torch.save(model.state_dict(), "model.pt")
