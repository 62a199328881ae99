"""Any error of a batch is caught and the batch is left out; sometimes the model itself refuses its input."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"
SURVIVES = "nan_sample"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        if x.isnan().any():
            raise ValueError("the input has NaN")
        return self.head(self.hidden(x).tanh())


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

failed = 0
for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4):
        optimizer.zero_grad()
        try:
            loss = plant.spoil_loss((model(a) - b).square().mean())
            loss.backward()
            plant.spoil_gradient(model)
            optimizer.step()
        except ValueError as error:
            print("left out:", error)
            failed += 1
            continue
        plant.spoil_between_steps(model, optimizer)

print("failed", failed)
torch.save(model.state_dict(), "model.pt")
