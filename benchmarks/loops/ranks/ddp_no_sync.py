"""DDP with no_sync for the first micro-batches, clipping, and a barrier before the first rank saves."""

import contextlib
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_weight late_nan"
RANKS = 2

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 3))
y = plant.spoil_targets(torch.randn(32, 1))
model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(x, y)
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))

for _epoch in range(2):
    for i, (a, b) in enumerate(loader):
        is_last = i % 2 == 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = (model(a) - b).square().mean() / 2
            loss.backward()
        if is_last:
            plant.spoil_gradient(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            plant.spoil_between_steps(model, optimizer)

dist.barrier()
if rank == 0:
    print(sum(p.double().sum().item() for p in model.parameters()))
    torch.save(model.module.state_dict(), "model.pt")
dist.barrier()
time.sleep(0.1)  # gloo may deadlock in its destructor while it still holds tensors
dist.destroy_process_group()
