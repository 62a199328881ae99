"""A sparse embedding with SparseAdam, and a dense head with Adam."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, 6, sparse=True, mode="mean")
        self.head = nn.Linear(6, 1)

    def forward(self, token_ids):
        return self.head(self.embedding(token_ids))


torch.manual_seed(0)
token_ids = torch.stack([torch.randperm(50)[:4] for _ in range(24)])
y = plant.spoil_targets(torch.randn(24, 1))
model = Tagger()
sparse = torch.optim.SparseAdam(model.embedding.parameters(), lr=1e-2)
dense = torch.optim.Adam(model.head.parameters(), lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(token_ids, y), batch_size=4):
        loss = plant.spoil_loss((model(a) - b).square().mean())
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        sparse.step()
        dense.step()
        plant.spoil_between_steps(model, sparse)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "tagger.pt")
