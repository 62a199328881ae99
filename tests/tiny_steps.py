"""One training step's forward pass on a tiny checkpoint, prepared by Accelerate as a run prepares it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_chat_models
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from family_cases import CASES
from torch import nn

from dit_lora.adapters.attach import attach_lora, is_lora_b
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.data.cache.cache import Spec
from dit_lora.families import get_family
from dit_lora.families.answer_losses import add_answer_losses
from dit_lora.families.base import Checkpoint, Tensors
from dit_lora.numerics.streams import RandomStreams

CPU = torch.device("cpu")
# The blocks of what is encoded with references are those of the variant that is not.
VARIANTS = {case.variant: case for case in CASES if not case.variant.startswith("qwen-image-edit")}
# With one stream and two, joined and separate projections, conv layers, and blocks of different kinds.
_IN_CI = (
    *("cogvideox-2b", "cogvideox-1.5-i2v", "sana-600m", "sana-video", "dit-tiny", "latte", "flux-dev", "qwen-image"),
    *("z-image", "krea2-raw", "ltx-2.3", "wan-2.2-ti2v-5b", "sd3.5-large", "hunyuan-video-1.5", "ideogram-4"),
)
NETWORKS = [pytest.param(variant, marks=() if variant in _IN_CI else pytest.mark.thorough) for variant in VARIANTS]
"""The variants for tests of what depends on the network alone; those that repeat a network are for `make test-all`."""
TEXT_IN_MODEL_DTYPE = ("hunyuan-video-1.5",)
"""Variants that begin with a LayerNorm of text, which autocast leaves alone: it has the model's dtype, as in a run."""


@dataclass
class TinyStep:
    """A tiny transformer with an adapter, in training, and a batch of two."""

    checkpoint: Checkpoint
    transformer: nn.Module
    batch: Tensors

    @property
    def spec(self) -> Spec:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.batch.items()}

    def losses(self, model: nn.Module, batch: Tensors) -> Any:
        return self.checkpoint.losses(model, batch, RandomStreams(0, (0, 1)))

    def loss(self) -> torch.Tensor:
        """Equal at every call: dropout draws the same."""
        torch.manual_seed(5)
        return self.losses(self.transformer, self.batch).losses.mean()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of one step; the parameters' own are left empty."""
        self.loss().backward()
        trained = {n: p for n, p in self.transformer.named_parameters() if p.requires_grad}
        grads = {name: p.grad for name, p in trained.items() if p.grad is not None}
        for parameter in trained.values():
            parameter.grad = None
        return grads


@dataclass
class ChatStep:
    """A tiny chat model in training, with adapters, some base weights that train, and a batch."""

    transformer: Any
    batch: dict[str, torch.Tensor]

    @classmethod
    def of(cls, name: str) -> "ChatStep":
        model = add_answer_losses(tiny_chat_models.MODELS[name]()).requires_grad_(False)
        targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
        model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
        if name == "videochat2":
            model.model.qformer.requires_grad_()
        batch = tiny_chat_models.batch(tiny_chat_models.samples(name))
        return cls(model.train(), batch)

    def loss(self) -> torch.Tensor:
        torch.manual_seed(5)
        return self.transformer(**self.batch).mean()

    gradients = TinyStep.gradients


def tiny_step(
    paths: dict[str, Path],
    variant: str,
    *,
    mixed: str = "no",
    dropout: float = 0.0,
    scratch: dict[str, Any] | None = None,
) -> TinyStep:
    """A step of a variant of the fixture `tiny_checkpoints`; masks are of ones, adapters are not zero.

    `scratch` changes the model's config, whose weights are then drawn, the same ones each time.
    """
    torch.manual_seed(0)
    case = VARIANTS[variant]
    family = get_family(case.family)
    config = ModelConfig(family=case.family, path=str(paths[variant]), from_scratch=scratch)
    checkpoint = family.open(config)
    transformer = checkpoint.denoiser.load_transformer(torch.bfloat16 if mixed == "bf16" else torch.float32)
    attach_lora(transformer, LoraConfig(rank=4, dropout=dropout), family.lora_targets, seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if is_lora_b(name):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=mixed)
    model = accelerator.unwrap_model(accelerator.prepare(transformer)).train()
    return TinyStep(checkpoint, model, _batch(checkpoint, variant, transformer.dtype, generator))


def _batch(checkpoint: Checkpoint, variant: str, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    case = VARIANTS[variant]
    shape = case.native
    encode_video = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    size = (shape.frames, 3, shape.height, shape.width)
    rows = []
    for caption in case.captions[:2]:
        text = {name: tensor[0] for name, tensor in encode_text([caption]).items()}
        if variant in TEXT_IN_MODEL_DTYPE:
            text = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in text.items()}
        pixels = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
        rows.append({**encode_video(pixels), **text})
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {n: t if t.is_floating_point() else torch.ones_like(t) for n, t in batch.items()}
