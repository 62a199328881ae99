"""Lightning with automatic optimization, a schedule, clipping and its own checkpoint."""

import sys
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import plant

FAULTS = "nan_sample nan_target inf_gradient nan_moment nan_weight nan_loss late_nan late_weight"
GUARDS = "command callback"
PRELOAD = "lightning"

warnings.filterwarnings("ignore")


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return plant.spoil_loss(nn.functional.mse_loss(self.net(x), y))

    def on_after_backward(self):
        plant.spoil_gradient(self)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        plant.spoil_between_steps(self, self.optimizers().optimizer)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


L.seed_everything(0, verbose=False)
x = plant.spoil_samples(torch.randn(24, 3))
y = plant.spoil_targets(torch.randn(24, 1))
callbacks = []
if "--guard=callback" in sys.argv:
    import dit_lora

    callbacks.append(dit_lora.LightningGuard(folder="dit_lora_guard"))
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=2,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=callbacks,
)
model = Regressor()
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True))
trainer.save_checkpoint("last.ckpt", weights_only=True)
torch.save(model.net.state_dict(), "net.pt")
