"""Three-fold cross-validation with Subset: a model, optimizer and schedule for each fold."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3), index=7)
y = plant.spoil_targets(torch.randn(24, 1), index=7)
data = TensorDataset(x, y)

for fold in range(3):
    held_out = [i for i in range(24) if i % 3 == fold]
    train_rows = [i for i in range(24) if i % 3 != fold]
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _epoch in range(2):
        for a, b in DataLoader(Subset(data, train_rows), batch_size=4, shuffle=True):
            optimizer.zero_grad()
            plant.spoil_loss((model(a) - b).square().mean()).backward()
            plant.spoil_gradient(model)
            optimizer.step()
            plant.spoil_between_steps(model, optimizer)
        scheduler.step()
    model.eval()
    with torch.no_grad():
        score = sum((model(a) - b).square().sum() for a, b in DataLoader(Subset(data, held_out)))
    print("fold", fold, scheduler.get_last_lr(), f"{score.item():.5f}")
    torch.save(model.state_dict(), f"fold_{fold}.pt")
