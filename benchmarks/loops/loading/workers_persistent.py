"""One persistent worker that reads four batches ahead; batches are changed in the loop; the loader is shuffled."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_weight nan_loss"
GUARDS = "command watch"


class Rows(Dataset):
    def __init__(self):
        self.rows = torch.randn(36, 3, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"x": plant.spoil_item(self.rows[index], index), "y": self.rows[index].mean()}


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=4)

if "--guard=watch" in sys.argv:
    import dit_lora

    dit_lora.Guard.watch(model, optimizer, loader=loader, folder="dit_lora_guard")

for epoch in range(2):
    for batch in loader:
        x = (batch["x"] - 0.1) / 0.9
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(x).squeeze(1) - batch["y"]).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"epoch {epoch}: {loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
