"""SGD with momentum over a shuffled loader whose generator is seeded; zero_grad comes after the step."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 4))
y = plant.spoil_targets(torch.randn(32, 2))
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))

for epoch in range(3):
    total = 0.0
    for a, b in loader:
        loss = F.smooth_l1_loss(net(a), b)
        loss = plant.spoil_loss(loss)
        loss.backward()
        plant.spoil_gradient(net)
        opt.step()
        plant.spoil_between_steps(net, opt)
        opt.zero_grad()
        total += loss.item()
    print(epoch, total)

torch.save(net.state_dict(), "net.pt")
