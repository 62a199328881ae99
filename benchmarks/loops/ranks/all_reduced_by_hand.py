"""Two gloo ranks without DistributedDataParallel: the loop itself adds up gradients, and the first rank saves."""

import os
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_loss late_nan"
RANKS = 2

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 3))
y = plant.spoil_targets(torch.randn(32, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    if rank == 0:
        print(f"{loss.item():.6f}")

if rank == 0:
    torch.save(model.state_dict(), "model.pt")
dist.barrier()
time.sleep(0.1)  # gloo may deadlock in its destructor while it still holds tensors
dist.destroy_process_group()
