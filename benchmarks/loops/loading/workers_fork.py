"""Two forked worker processes; each reads two batches ahead."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_loss late_nan"


class Rows(Dataset):
    def __init__(self):
        self.rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return plant.spoil_item(self.rows[index], index)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        for x in DataLoader(Rows(), batch_size=4, num_workers=2):
            optimizer.zero_grad()
            loss = plant.spoil_loss((model(x) - x).square().mean())
            loss.backward()
            plant.spoil_gradient(model)
            optimizer.step()
            plant.spoil_between_steps(model, optimizer)
        print(f"epoch {epoch}: {loss.item():.6f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
