"""A GAN: discriminator and generator take turns, each with its own Adam."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 4) + 2)
generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))

for _epoch in range(2):
    for real in DataLoader(x, batch_size=4, shuffle=True):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        d_optimizer.zero_grad()
        fake = generator(torch.randn(len(real), 2))
        d_loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        d_loss.backward()
        plant.spoil_gradient(discriminator)
        d_optimizer.step()

        g_optimizer.zero_grad()
        g_loss = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        g_loss = plant.spoil_loss(g_loss)
        g_loss.backward()
        g_optimizer.step()
        plant.spoil_between_steps(generator, g_optimizer)
    print(f"{d_loss.item():.5f} {g_loss.item():.5f}")

torch.save({"g": generator.state_dict(), "d": discriminator.state_dict()}, "gan.pt")
