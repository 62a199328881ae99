"""A causal mask of -inf in a buffer, and a best score that begins at infinity: both are saved in every checkpoint."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"
GUARDS = "command watch"
INFINITE = "model/mask checkpoint/score"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.out = nn.Linear(6, 1)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 6**0.5 + self.mask
        return self.out(scores.softmax(-1) @ v)


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 4, 6))
y = plant.spoil_targets(torch.randn(24, 4, 1))
model = Attention()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
best = {"score": torch.tensor(float("inf")), "mode": "min"}

if "--guard=watch" in sys.argv:
    import dit_lora

    dit_lora.Guard.watch(model, optimizer, folder="dit_lora_guard")

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    torch.save({"model": model.state_dict(), "checkpoint": best}, f"epoch_{_epoch}.pt")
    print(f"{loss.item():.6f}")
