"""Momentum contrast: a queue of keys in a buffer, a key encoder that follows by momentum, an in-batch loss."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss nan_state late_nan"
SPREADS = "queue key."


class MoCo(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(size, 4), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys):
        i = int(self.pointer)
        self.queue[i : i + len(keys)] = keys
        self.pointer.fill_((i + len(keys)) % len(self.queue))

    def forward(self, query_view, key_view):
        q = F.normalize(self.query(query_view), dim=1)
        with torch.no_grad():
            for k, p in zip(self.key.parameters(), self.query.parameters(), strict=True):
                k.mul_(0.9).add_(p, alpha=0.1)
            keys = F.normalize(self.key(key_view), dim=1)
        logits = torch.cat([(q * keys).sum(1, keepdim=True), q @ self.queue.t().clone()], 1)
        self.enqueue(keys)
        return logits / 0.2


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 4))
model = MoCo()
optimizer = torch.optim.SGD(model.query.parameters(), lr=0.05, momentum=0.9)

for _epoch in range(2):
    for a in DataLoader(x, batch_size=4, shuffle=True):
        logits = model(a + 0.1 * torch.randn_like(a), a + 0.1 * torch.randn_like(a))
        loss = F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))
        optimizer.zero_grad()
        plant.spoil_loss(loss).backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
        plant.spoil_state("queue", model.queue)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "moco.pt")
