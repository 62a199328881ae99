"""A siamese network: the model is called twice, for the pair's first and second half, whose rows are other samples."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan replay_oom"


class Pairs(Dataset):
    def __init__(self):
        self.rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))
        self.partners = torch.randn(24, 4, generator=torch.Generator().manual_seed(6))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], plant.spoil_item(self.partners[index], index), float(index % 2)


torch.manual_seed(0)
model = plant.limit_calls(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for anchor, partner, is_pair in DataLoader(Pairs(), batch_size=4, shuffle=True):
        order = torch.randperm(len(partner))  # negatives: the second half in another order
        anchor_code, partner_code, negative_code = model(anchor), model(partner), model(partner[order])
        near = (anchor_code - partner_code).square().sum(1)
        far = (anchor_code - negative_code).square().sum(1)
        loss = (is_pair * near + (1 - is_pair) * torch.relu(1 - far)).mean()
        loss = plant.spoil_loss(loss + 0.01 * near.mean())
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
