"""PPO: several epochs of shuffled minibatches over one rollout, with the log-probabilities of its start."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
states = plant.spoil_samples(torch.randn(24, 4))
advantages = plant.spoil_targets(torch.randn(24))
actions = torch.randint(0, 3, (24,))
policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2, eps=1e-5)


def log_probability(s, a):
    return torch.distributions.Categorical(logits=policy(s), validate_args=False).log_prob(a)


with torch.no_grad():
    old = log_probability(states, actions)
rollout = TensorDataset(states, actions, old, advantages)

for _epoch in range(3):
    for s, a, before, advantage in DataLoader(rollout, batch_size=6, shuffle=True):
        ratio = (log_probability(s, a) - before).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = plant.spoil_loss(-torch.min(ratio * advantage, clipped * advantage).mean())
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(policy)
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        plant.spoil_between_steps(policy, optimizer)
    print(f"{loss.item():.6f}")

torch.save(policy.state_dict(), "policy.pt")
