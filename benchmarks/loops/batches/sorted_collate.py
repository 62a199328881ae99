"""The collate function sorts sequences by length for pack_padded_sequence, and forgets their order."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan replay_oom"


def collate(rows):
    rows.sort(key=len, reverse=True)
    return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 8, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x, lengths):
        _, h = self.rnn(pack_padded_sequence(x, lengths, batch_first=True))
        return self.out(h[-1])


torch.manual_seed(0)
lengths = [3, 7, 5, 9, 4, 8, 6, 2, 10, 11, 3, 5, 7, 2, 6, 4]
data = plant.spoil_samples([torch.randn(n, 4) for n in lengths])
model = plant.limit_calls(Encoder())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for x, n in DataLoader(data, batch_size=4, collate_fn=collate):
        optimizer.zero_grad()
        loss = plant.spoil_loss((model(x, n) - 1).square().mean())
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "encoder.pt")
