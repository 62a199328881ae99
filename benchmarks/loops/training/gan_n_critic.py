"""A Wasserstein GAN with clipped weights: five steps of the critic for each of the generator."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"

N_CRITIC = 5

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(40, 4) + 2)
generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
g_optimizer = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
c_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)

for _epoch in range(2):
    for i, real in enumerate(DataLoader(x, batch_size=4, shuffle=True), 1):
        with torch.no_grad():
            fake = generator(torch.randn(len(real), 2))
        c_optimizer.zero_grad()
        c_loss = plant.spoil_loss(critic(fake).mean() - critic(real).mean())
        c_loss.backward()
        plant.spoil_gradient(critic)
        c_optimizer.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.1, 0.1)
        plant.spoil_between_steps(critic, c_optimizer)
        if i % N_CRITIC == 0:
            for p in critic.parameters():
                p.requires_grad_(False)
            g_optimizer.zero_grad()
            g_loss = -critic(generator(torch.randn(len(real), 2))).mean()
            g_loss.backward()
            g_optimizer.step()
            for p in critic.parameters():
                p.requires_grad_(True)
    print(f"{c_loss.item():.5f} {g_loss.item():.5f}")

torch.save(critic.state_dict(), "critic.pt")
torch.save(generator.state_dict(), "generator.pt")
