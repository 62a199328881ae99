"""Deep Q-learning: a replay buffer that is drawn from at random, and a target network that is copied now and then."""

import copy
import random

import torch
from torch import nn

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss nan_state late_nan"
SPREADS = "target"

torch.manual_seed(0)
states = plant.spoil_samples(torch.randn(32, 4))
buffer = [(states[i], i % 2, float(i % 3), states[i + 1]) for i in range(31)]
online = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-2)
draw = random.Random(0)

for step in range(16):
    batch = draw.sample(buffer, 8)
    s, a, r, following = (torch.stack([torch.as_tensor(v) for v in vs]) for vs in zip(*batch))  # noqa: B905
    with torch.no_grad():
        target_q = r + 0.9 * target(following).max(1).values
    q = online(s).gather(1, a.unsqueeze(1)).squeeze(1)
    loss = plant.spoil_loss(nn.functional.smooth_l1_loss(q, target_q.float()))
    optimizer.zero_grad()
    loss.backward()
    plant.spoil_gradient(online)
    optimizer.step()
    plant.spoil_between_steps(online, optimizer)
    if step % 4 == 3:
        target.load_state_dict(online.state_dict())
    plant.spoil_state("target", target[0].weight)

print(f"{loss.item():.6f}")
torch.save({"online": online.state_dict(), "target": target.state_dict()}, "q.pt")
