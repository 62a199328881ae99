"""Items that cannot be read are None; the collate function drops them, so that batches are shorter."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"


class Files(Dataset):
    def __init__(self):
        self.rows = torch.randn(24, 3, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index in (1, 4, 13):  # a broken file
            return None
        return {"x": plant.spoil_item(self.rows[index], index), "y": self.rows[index].sum() / 3}


def collate(items):
    return default_collate([item for item in items if item is not None])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Files(), batch_size=4, collate_fn=collate)

for _epoch in range(2):
    for batch in loader:
        prediction = model(batch["x"]).squeeze(1)
        loss = plant.spoil_loss((prediction - batch["y"]).square().mean())
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(len(batch["x"]), f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
