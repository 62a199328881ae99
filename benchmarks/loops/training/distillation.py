"""Distillation from a frozen teacher, with temperature; the teacher was read from a file."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss nan_state late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 4))
teacher = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
torch.save(teacher.state_dict(), "teacher.pt")
teacher.load_state_dict(torch.load("teacher.pt"))
teacher.requires_grad_(False)
student = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)

for _epoch in range(2):
    for a in DataLoader(x, batch_size=4):
        with torch.no_grad():
            soft_targets = F.softmax(teacher(a) / 2, dim=1)
        loss = F.kl_div(F.log_softmax(student(a) / 2, dim=1), soft_targets, reduction="batchmean") * 4
        optimizer.zero_grad()
        plant.spoil_loss(loss).backward()
        plant.spoil_gradient(student)
        optimizer.step()
        plant.spoil_between_steps(student, optimizer)
        plant.spoil_state("2.weight", teacher[2].weight)
    print(f"{loss.item():.6f}")

torch.save(student.state_dict(), "student.pt")
