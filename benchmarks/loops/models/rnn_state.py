"""Truncated backpropagation through time: the hidden state is carried from batch to batch, detached."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss nan_state late_nan"
SPREADS = "hidden argument"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x, hidden=None):
        output, hidden = self.rnn(x, hidden)
        return self.head(output), hidden


torch.manual_seed(0)
series = plant.spoil_samples(torch.randn(24, 5, 3))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for _epoch in range(2):
    hidden = None
    for x in DataLoader(series, batch_size=4):
        optimizer.zero_grad()
        prediction, hidden = model(x, hidden)
        hidden = plant.spoil_state("hidden", hidden.detach())
        loss = plant.spoil_loss((prediction - x).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
