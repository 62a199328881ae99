"""WGAN-GP: the penalty is on the norm of the critic's input gradient, with a backward through a backward."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 4) + 2)
generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))

for _epoch in range(2):
    for real in DataLoader(x, batch_size=4):
        fake = generator(torch.randn(len(real), 2)).detach()
        mix = torch.rand(len(real), 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        c_loss = plant.spoil_loss(critic(fake).mean() - critic(real).mean() + 10 * penalty)
        c_optimizer.zero_grad()
        c_loss.backward()
        plant.spoil_gradient(critic)
        c_optimizer.step()
        plant.spoil_between_steps(critic, c_optimizer)

        g_loss = -critic(generator(torch.randn(len(real), 2))).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
    print(f"{c_loss.item():.5f} {g_loss.item():.5f}")

torch.save({"generator": generator.state_dict(), "critic": critic.state_dict()}, "wgan.pt")
