"""One optimizer for each parameter, which steps inside the backward, from a post-accumulate-grad hook."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizers = {p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in model.parameters()}


def step(parameter):
    # The first layer's gradient comes last: the others have stepped by then.
    if parameter is model[0].weight:
        plant.spoil_gradient(model)
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_between_steps(model, optimizers[model[0].weight])
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
