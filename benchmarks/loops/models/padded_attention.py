"""A transformer encoder with a padding mask, dropout, learned positions and a tied output layer."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"


def collate(rows):
    tokens = pad_sequence(rows, batch_first=True, padding_value=0)
    return tokens, tokens == 0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.positions = nn.Parameter(torch.zeros(12, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, padding):
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.encoder(x, src_key_padding_mask=padding))


torch.manual_seed(0)
data = [torch.randint(1, 20, (3 + i % 7,)) for i in range(24)]
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for tokens, padding in DataLoader(data, batch_size=4, collate_fn=collate, shuffle=True):
        logits = model(tokens, padding)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=0)
        optimizer.zero_grad()
        plant.spoil_loss(loss).backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "model.pt")
