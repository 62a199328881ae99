"""Token classification with ignored labels: -100 where there is nothing to learn."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss empty_batch late_nan"

torch.manual_seed(0)
features = plant.spoil_samples(torch.randn(24, 5, 4))
labels = torch.randint(0, 3, (24, 5))
labels[:, 0] = -100
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for x, y in DataLoader(TensorDataset(features, labels), batch_size=4, shuffle=True):
        logits = model(x)
        mask = plant.clear_mask((y != -100).float())
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        loss = plant.spoil_loss((losses * mask.flatten()).sum() / mask.sum())
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
