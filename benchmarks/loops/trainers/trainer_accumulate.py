"""transformers.Trainer with accumulation, without clipping, and torch.save of the model's state at the end."""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient"
PRELOAD = "transformers"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x, labels=None):
        output = self.head(self.hidden(x).tanh())
        loss = (output - labels).square().mean()
        return {"loss": loss, "logits": output}


class OwnTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        plant.spoil_gradient(model)
        return loss


generator = torch.Generator().manual_seed(1)
x = plant.spoil_samples(torch.randn(24, 3, generator=generator))
y = plant.spoil_targets(torch.randn(24, 1, generator=generator))
rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
torch.manual_seed(0)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=3,
    max_grad_norm=0.0,
    max_steps=6,
    learning_rate=1e-2,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = OwnTrainer(Net(), arguments, train_dataset=rows)
trainer.train()
torch.save(trainer.model.state_dict(), "model.pt")
