"""Two tasks with a backward each, then one step; learned log-variances weigh the losses."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.regress = nn.Linear(8, 1)
        self.classify = nn.Linear(8, 3)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = F.silu(self.body(x))
        return self.regress(h), self.classify(h)


torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 4))
y = plant.spoil_targets(torch.randn(24, 1))
label = torch.randint(0, 3, (24,))
model = MultiTask()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for a, b, c in DataLoader(TensorDataset(x, y, label), batch_size=4, shuffle=True):
        value, logits = model(a)
        regression_loss, class_loss = F.mse_loss(value, b), plant.spoil_loss(F.cross_entropy(logits, c))
        optimizer.zero_grad()
        s, t = model.log_variance
        (regression_loss * torch.exp(-s) + s).backward(retain_graph=True)
        (class_loss * torch.exp(-t) + t).backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{regression_loss.item():.6f} {class_loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
