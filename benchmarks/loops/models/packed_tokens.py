"""Packing without padding: sequences joined in one row, with cu_seqlens for attention."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan replay_oom"


def collate(sequences):
    lengths = torch.tensor([0, *(len(s) for s in sequences)])
    return {"x": torch.cat(sequences), "cu_seqlens": lengths.cumsum(0)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4)

    def forward(self, x, cu_seqlens):
        bounds = cu_seqlens.tolist()
        if bounds[-1] != len(x):
            raise ValueError(f"cu_seqlens ends at {bounds[-1]}, there are {len(x)} tokens")
        q, k, v = self.qkv(x).chunk(3, -1)
        parts = [
            F.scaled_dot_product_attention(q[None, i:j], k[None, i:j], v[None, i:j])[0]
            for i, j in itertools.pairwise(bounds)
        ]
        return x + self.out(torch.cat(parts))


torch.manual_seed(0)
lengths = [3, 7, 5, 6, 4, 8, 6, 2, 5, 4, 3, 5, 7, 2, 6, 4]
data = plant.spoil_samples([torch.randn(n, 4) for n in lengths])
model = plant.limit_calls(Block())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for batch in DataLoader(data, batch_size=4, collate_fn=collate):
        output = model(**batch)
        loss = plant.spoil_loss((output - batch["x"].roll(1, 0)).square().mean())
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "block.pt")
