"""Complex weights: a filter in the frequency domain."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"


class Filter(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.response = nn.Parameter(torch.randn(length // 2 + 1, dtype=torch.cfloat) * 0.3)
        self.gain = nn.Parameter(torch.ones(length))

    def forward(self, x):
        spectrum = torch.fft.rfft(x) * self.response
        return torch.fft.irfft(spectrum, n=x.shape[-1]) * self.gain


torch.manual_seed(0)
signals = plant.spoil_samples(torch.randn(24, 8))
model = Filter(8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for x in DataLoader(signals, batch_size=4, shuffle=True):
        loss = plant.spoil_loss((model(x) - x.roll(1, -1)).square().mean())
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "filter.pt")
