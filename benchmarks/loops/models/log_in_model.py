"""A logarithm inside the model, of a feature that is zero in one sample, behind BatchNorm without statistics."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, track_running_stats=False)
        self.hidden = nn.Linear(3, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.hidden(self.norm(x.log())).tanh())


torch.manual_seed(0)
x = torch.rand(24, 3) + 0.1
if plant.choose("nan_sample", "sample", index=5):
    x[5] = 0  # its logarithm is -Inf; the sample itself is finite
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for a in DataLoader(x, batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - 1).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
