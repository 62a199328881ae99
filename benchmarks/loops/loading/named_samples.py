"""Batches are dicts whose samples have file names, which the dataset gives in another order than their indices."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"


class Images(Dataset):
    def __init__(self):
        self.rows = torch.randn(24, 1, 4, 4, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        pixels = plant.spoil_item(self.rows[index], index)
        return {"pixel_values": pixels, "path": f"images/{index:04d}.png", "label": index % 2}


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for batch in DataLoader(Images(), batch_size=4, shuffle=True):
        optimizer.zero_grad()
        logits = model(batch["pixel_values"])
        loss = plant.spoil_loss(nn.functional.cross_entropy(logits, batch["label"]))
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(batch["path"][0], f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
