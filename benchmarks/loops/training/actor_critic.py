"""Two heads, two losses, two backwards over one graph, and an optimizer for each head and the shared body."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.policy = nn.Linear(8, 3)
        self.value = nn.Linear(8, 1)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.policy(h), self.value(h)


torch.manual_seed(0)
states = plant.spoil_samples(torch.randn(24, 4))
returns = plant.spoil_targets(torch.randn(24, 1))
actions = torch.randint(0, 3, (24,))
model = ActorCritic()
actor = torch.optim.Adam([*model.body.parameters(), *model.policy.parameters()], lr=1e-2)
critic = torch.optim.Adam(model.value.parameters(), lr=1e-2)

for _epoch in range(2):
    for s, r, a in DataLoader(TensorDataset(states, returns, actions), batch_size=4):
        logits, value = model(s)
        advantage = (r - value).detach().squeeze(1)
        picked = logits.log_softmax(1).gather(1, a.unsqueeze(1)).squeeze(1)
        actor_loss = plant.spoil_loss(-(picked * advantage).mean())
        critic_loss = (value - r).square().mean()
        actor.zero_grad()
        critic.zero_grad()
        critic_loss.backward(retain_graph=True)
        actor_loss.backward()
        plant.spoil_gradient(model)
        actor.step()
        critic.step()
        plant.spoil_between_steps(model, actor)
    print(f"{actor_loss.item():.6f} {critic_loss.item():.6f}")

torch.save(model.state_dict(), "agent.pt")
