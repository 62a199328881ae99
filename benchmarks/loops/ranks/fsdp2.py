"""fully_shard on two gloo ranks; the full state dict is gathered, and the first rank saves it."""

import time

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_weight nan_loss late_nan"
RANKS = 2

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(32, 3))
y = plant.spoil_targets(torch.randn(32, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
mesh = init_device_mesh("cpu", (2,))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(x, y)
sampler = DistributedSampler(data, shuffle=False)

for _epoch in range(2):
    for a, b in DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    if rank == 0:
        print(f"{loss.item():.6f}")

options = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=options)
if rank == 0:
    torch.save(state, "model.pt")
dist.barrier()
time.sleep(0.1)  # gloo may deadlock in its destructor while it still holds tensors
dist.destroy_process_group()
