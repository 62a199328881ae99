"""Lightning with manual optimization: a GAN with two optimizers."""

import warnings

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.loops import plant

FAULTS = "nan_sample inf_gradient nan_moment nan_weight nan_loss late_nan"
PRELOAD = "lightning"

warnings.filterwarnings("ignore")


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, real, batch_idx):
        g_optimizer, c_optimizer = self.optimizers()
        fake = self.generator(torch.randn(len(real), 2))
        c_loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        c_optimizer.zero_grad()
        self.manual_backward(plant.spoil_loss(c_loss))
        plant.spoil_gradient(self.critic)
        c_optimizer.step()
        plant.spoil_between_steps(self.critic, c_optimizer.optimizer)

        g_loss = F.softplus(-self.critic(fake)).mean()
        self.toggle_optimizer(g_optimizer)
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)
        g_optimizer.step()
        self.untoggle_optimizer(g_optimizer)

    def configure_optimizers(self):
        g_optimizer = torch.optim.Adam(self.generator.parameters(), lr=1e-3)
        return g_optimizer, torch.optim.Adam(self.critic.parameters(), lr=1e-3)


L.seed_everything(0, verbose=False)
x = plant.spoil_samples(torch.randn(24, 4))
model = GAN()
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(x, batch_size=4, shuffle=True))
torch.save(model.state_dict(), "gan.pt")
