"""A variational autoencoder: the model draws noise, returns a tuple, and its loss has two terms."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.mean = nn.Linear(8, 2)
        self.log_variance = nn.Linear(8, 2)
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x):
        h = self.encoder(x).relu()
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 6))
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for a in DataLoader(x, batch_size=4, shuffle=True):
        output, mean, log_variance = model(a)
        reconstruction = (output - a).square().sum(1)
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        loss = plant.spoil_loss((reconstruction + kl).mean())
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "vae.pt")
