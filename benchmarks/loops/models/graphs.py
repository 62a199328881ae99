"""Graphs batched as in PyTorch Geometric: all nodes in one tensor, edge_index, and each node's graph."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"


def collate(graphs):
    nodes, edges, graph, offset = [], [], [], 0
    for number, (x, edge_index) in enumerate(graphs):
        nodes.append(x)
        edges.append(edge_index + offset)
        graph += [number] * len(x)
        offset += len(x)
    return torch.cat(nodes), torch.cat(edges, 1), torch.tensor(graph)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(4, 8)
        self.message = nn.Linear(4, 8, bias=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x, edge_index, graph):
        source, target = edge_index
        messages = torch.zeros(len(x), 8).index_add(0, target, self.message(x)[source])
        h = (self.own(x) + messages).relu()
        pooled = torch.zeros(int(graph.max()) + 1, 8).index_add(0, graph, h)
        return self.head(pooled)


torch.manual_seed(0)
sizes = [3, 5, 4, 6, 3, 4, 5, 2, 6, 3, 4, 5, 2, 3, 6, 4]
features = plant.spoil_samples([torch.randn(n, 4) for n in sizes])
graphs = [(x, torch.randint(0, len(x), (2, 2 * len(x)))) for x in features]
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for _epoch in range(2):
    for x, edge_index, graph in DataLoader(graphs, batch_size=4, collate_fn=collate, shuffle=True):
        loss = plant.spoil_loss((model(x, edge_index, graph) - 1).square().mean())
        optimizer.zero_grad()
        loss.backward()
        plant.spoil_gradient(model)
        optimizer.step()
        plant.spoil_between_steps(model, optimizer)
    print(f"{loss.item():.6f}")

torch.save(model.state_dict(), "net.pt")
