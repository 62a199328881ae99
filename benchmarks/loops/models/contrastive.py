"""CLIP-like: two towers, a learned scale, a loss in which every row meets every other row of the batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan replay_oom"


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(6, 4)
        self.text = nn.Linear(5, 4)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        image = F.normalize(self.image(image), dim=-1)
        text = F.normalize(self.text(text), dim=-1)
        return self.log_scale.exp() * image @ text.t()


torch.manual_seed(0)
images = plant.spoil_samples(torch.randn(24, 6))
texts = torch.randn(24, 5)
model = plant.limit_calls(Towers())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for image, text in DataLoader(TensorDataset(images, texts), batch_size=6, shuffle=True):
        logits = model(image, text)
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        plant.spoil_loss(loss).backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f} {model.log_scale.item():.6f}")

torch.save(model.state_dict(), "towers.pt")
