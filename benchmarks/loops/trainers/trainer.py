"""transformers.Trainer on a small hand-written model, with checkpoints and a cosine schedule."""

import sys

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"
GUARDS = "command callback"
PRELOAD = "transformers"
VARIES = "*training_args.bin"


class Rows(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = plant.spoil_samples(torch.randn(24, 3, generator=generator))
        self.y = plant.spoil_targets(torch.randn(24, 1, generator=generator))

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x, labels=None):
        output = self.head(self.hidden(x).tanh())
        return {"loss": (output - labels).square().mean(), "logits": output}


class OwnTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = plant.spoil_loss(outputs["loss"])
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        plant.spoil_gradient(model)
        return loss


class AfterStep(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        plant.spoil_between_steps(model, getattr(optimizer, "optimizer", optimizer))


torch.manual_seed(0)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    save_strategy="epoch",
    logging_steps=3,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = OwnTrainer(Net(), arguments, train_dataset=Rows(), callbacks=[AfterStep()])
if "--guard=callback" in sys.argv:
    import dit_lora

    trainer.add_callback(dit_lora.GuardCallback(trainer))
trainer.train()
trainer.save_model("final")
