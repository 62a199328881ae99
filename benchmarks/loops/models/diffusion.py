"""A diffusion loop: noise and timesteps are drawn in the loop, the model sees noisy data, the target is the noise."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan late_weight replay_oom"


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(10, 8)
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 6)

    def forward(self, noisy, t):
        return self.head((self.body(noisy) + self.time(t)).relu())


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 6))
model = plant.limit_calls(Denoiser())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
alphas = torch.linspace(0.99, 0.1, 10)

for _epoch in range(2):
    for clean in DataLoader(x, batch_size=4, shuffle=True):
        noise = torch.randn_like(clean)
        t = torch.randint(0, 10, (len(clean),))
        a = alphas[t].unsqueeze(1)
        noisy = a.sqrt() * clean + (1 - a).sqrt() * noise
        loss = plant.spoil_loss(nn.functional.mse_loss(model(noisy, t), noise))
        loss.backward()
        plant.spoil_gradient(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "denoiser.pt")
