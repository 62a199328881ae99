"""torch.save and pickle of the whole model, torch.save of optimizer and schedule; the model is read again."""

import pickle

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.hidden(x).tanh())


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

for epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(a) - b).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    scheduler.step()
    torch.save(model, "model.pt")
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({"epoch": epoch, **state}, "training.pt")
    with open("model.pkl", "wb") as file:
        pickle.dump(model, file)

reloaded = torch.load("model.pt", weights_only=False)
print(type(reloaded).__name__, len(reloaded._forward_hooks), len(reloaded._forward_pre_hooks))
print(sorted(vars(reloaded)) == sorted(vars(Net())), "forward" in vars(model))
