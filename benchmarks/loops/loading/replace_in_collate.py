"""The collate function puts a copy of the batch's last good item in the place of one that cannot be read."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_loss late_nan"


class Files(Dataset):
    def __init__(self):
        self.rows = torch.randn(24, 3, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index in (6, 13):  # a broken file
            return None
        return plant.spoil_item(self.rows[index], index)


def collate(items):
    good = [item for item in items if item is not None]
    for i, item in enumerate(items):
        if item is None:
            items[i] = items[i - 1] if i else good[0]
    return default_collate(items)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for epoch in range(2):
    for x in DataLoader(Files(), batch_size=4, collate_fn=collate):
        loss = plant.spoil_loss((model(x) - x).square().mean())
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"epoch {epoch}: {loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
