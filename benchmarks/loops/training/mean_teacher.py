"""A mean teacher: consistency with a model whose weights are the average of the student's."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss nan_state late_nan"

torch.manual_seed(0)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
student = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)

for _epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True):
        prediction = student(a + 0.05 * torch.randn_like(a))
        with torch.no_grad():
            teacher_prediction = teacher(a + 0.05 * torch.randn_like(a))
        loss = (prediction - b).square().mean() + (prediction - teacher_prediction).square().mean()
        optimizer.zero_grad()
        plant.spoil_loss(loss).backward()
        plant.spoil_gradient(student)
        optimizer.step()
        plant.spoil_between_steps(student, optimizer)
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.data.mul_(0.9).add_(s.data, alpha=0.1)
        plant.spoil_state("0.weight", teacher[0].weight)
    print(f"{loss.item():.6f}")

torch.save({"student": student.state_dict(), "teacher": teacher.state_dict()}, "teacher.pt")
