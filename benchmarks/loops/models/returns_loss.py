"""A model that is given labels and returns its loss, as Transformers' models do."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan replay_oom"


class Rows(Dataset):
    def __init__(self):
        self.x = plant.spoil_samples(torch.randn(24, 3, generator=torch.Generator().manual_seed(1)))
        self.y = plant.spoil_targets(torch.randn(24, 1, generator=torch.Generator().manual_seed(2)))

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"inputs": self.x[index], "labels": self.y[index]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs, labels=None):
        logits = self.head(self.body(inputs).relu())
        loss = None if labels is None else nn.functional.mse_loss(logits, labels)
        return {"loss": loss, "logits": logits}


torch.manual_seed(0)
model = plant.limit_calls(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for batch in DataLoader(Rows(), batch_size=4, shuffle=True):
        batch = {key: value.to("cpu") for key, value in batch.items()}
        outputs = model(**batch)
        loss = plant.spoil_loss(outputs["loss"])
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
