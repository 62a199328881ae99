"""A classifier of small pictures with cross entropy, label smoothing and a shuffled loader."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"


class Pictures(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(3)
        self.pixels = torch.rand(count, 1, 8, 8, generator=generator)

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return plant.spoil_item(self.pixels[index] * 2 - 1, index), index % 3


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Pictures(30), batch_size=4, shuffle=True, drop_last=False)

for epoch in range(2):
    correct = 0
    for pixels, labels in loader:
        logits = model(pixels)
        loss = plant.spoil_loss(F.cross_entropy(logits, labels, label_smoothing=0.1))
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
        correct += (logits.argmax(1) == labels).sum().item()
    print(f"epoch {epoch}: {correct} correct")

torch.save(model.state_dict(), "classifier.pth")
