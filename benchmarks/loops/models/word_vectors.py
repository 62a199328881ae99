"""Skip-gram with negative samples: only sparse embeddings, plain SGD."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "inf_gradient nan_weight nan_loss late_nan late_weight"

torch.manual_seed(0)
centre = torch.randint(0, 30, (32,))
context = torch.randint(0, 30, (32, 5))
model = nn.ModuleDict({"u": nn.Embedding(30, 8, sparse=True), "v": nn.Embedding(30, 8, sparse=True)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for _epoch in range(2):
    for c, neighbours in DataLoader(TensorDataset(centre, context), batch_size=8):
        scores = (model["u"](c).unsqueeze(1) * model["v"](neighbours)).sum(-1)
        labels = torch.zeros_like(scores)
        labels[:, 0] = 1
        loss = plant.spoil_loss(F.binary_cross_entropy_with_logits(scores, labels))
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "vectors.pt")
