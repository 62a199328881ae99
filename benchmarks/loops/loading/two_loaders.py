"""Semi-supervised: a labelled and an unlabelled loader side by side, in one call of the model."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = torch.randn(16, 3)
y = plant.spoil_targets(torch.randn(16, 1))
unlabelled = plant.spoil_samples(torch.randn(32, 3))
model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
labelled_loader = DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)
unlabelled_loader = DataLoader(unlabelled, batch_size=4)

for _epoch in range(2):
    for (a, b), u in zip(labelled_loader, unlabelled_loader, strict=True):
        outputs = model(torch.cat([a, u, u + 0.01 * torch.randn_like(u)]))
        labelled, unlabelled_output, noisy_output = outputs.split([len(a), len(u), len(u)])
        loss = (labelled - b).square().mean() + 0.1 * (unlabelled_output - noisy_output).square().mean()
        optimizer.zero_grad()
        plant.spoil_loss(loss).backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
