"""One worker process that is spawned: it imports this file by its name."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_loss"


class Rows(Dataset):
    def __init__(self):
        self.rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return plant.spoil_item(self.rows[index], index)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    for x in loader:
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(x) - x).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
