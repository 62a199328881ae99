"""Training of a tiny model in small: a step's micro-batches, its loss, its gradient, and the optimizer's step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.quantize import quantize_base
from dit_lora.config.lora import AdapterKind
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint, Tensors
from dit_lora.files import write_folder_atomically
from dit_lora.guard.gradient_check.cause import ReplayableStep
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.autocasts import restore_autocasts
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.quantized_linear import Quantization
from dit_lora.numerics.streams import RandomStreams

MICRO_BATCHES, SAMPLES = 2, 2
"""Per step, and per micro-batch."""
_CPU = torch.device("cpu")
_FRAMES = {"cogvideox": 9, "wan": 5}
_CAPTIONS = ("a red circle", "two blue squares", "a green line that moves", "yellow")
# Models of classes take the names of theirs.
_CLASSES = {
    "dit": ("class 0", "class 2", "class 3", "class 4"),
    "video_dit": ("blue disc", "blue square", "green disc", "red disc"),
}
_TEXT_TENSORS = ("prompt", "audio_prompt")
_TEXT_TOKENS = 16
_FIXED_TEXT_FAMILIES = ("cogvideox",)
"""Models whose position embedding fits one number of text tokens."""
_TEXT_IN_MODEL_DTYPE = ("hunyuan_video15",)
"""Models that begin with a LayerNorm of text, which autocast leaves alone: text has the model's dtype, as in a run."""


@dataclass
class TinyTraining:
    """A tiny transformer with a LoRA in training."""

    checkpoint: Checkpoint
    model: nn.Module
    dtype: torch.dtype
    data: list[Tensors]
    num_micro_batches: int = MICRO_BATCHES
    step: int = 0
    optimizer: torch.optim.Optimizer = field(init=False)
    before_backward: Callable[[], None] | None = None
    """Called at the start of each backward pass."""

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-3)

    @classmethod
    def from_family(
        cls,
        family_name: str,
        folder: Path,
        dtype: torch.dtype,
        *,
        dropout: float = 0.0,
        seed: int = 0,
        adapter: AdapterKind = "lora",
        quantize: Quantization | None = None,
        num_micro_batches: int = MICRO_BATCHES,
    ) -> "TinyTraining":
        """Build the family's first tiny checkpoint in `folder`, unless it is there, and attach an adapter.

        Where the model allows it, the embeddings of captions are shortened, which takes less time.
        """
        family = get_family(family_name)
        variant = family.tiny_variants[0]
        path = folder / variant
        if not path.exists():
            with write_folder_atomically(path) as staged:
                family.build_tiny_checkpoint(variant, staged, 0)
        checkpoint = family.open(ModelConfig(family=family_name, path=str(path)))
        torch.manual_seed(seed)
        model = checkpoint.denoiser.load_transformer(dtype)
        if quantize is not None:
            quantize_base(model, quantize)
        # A rotation has a block size, and no rank.
        lora = LoraConfig(kind=adapter, dropout=dropout, rank=None if adapter == "oft" else 4)
        attach_lora(model, lora, family.lora_targets, seed=seed)
        data = _encode_samples(checkpoint, family_name)
        if family_name not in _FIXED_TEXT_FAMILIES:
            data = [_shorten_text(batch, _TEXT_TOKENS) for batch in data]
        if family_name in _TEXT_IN_MODEL_DTYPE:
            data = [_convert_text(batch, dtype) for batch in data]
        return cls(checkpoint, model.train(), dtype, data, num_micro_batches)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def make_micro_batches(self) -> list[Tensors]:
        """The present step's micro-batches; noise and timesteps differ from step to step."""
        return [self.data[(self.step + k) % len(self.data)] for k in range(self.num_micro_batches)]

    def compute_losses(self, batch: Tensors, micro_step: int) -> torch.Tensor:
        """Losses of a micro-batch's samples, equal at every call: all draws follow from step and micro-step."""
        torch.manual_seed(1000 * self.step + micro_step)
        seeds = [1000 * self.step + 10 * micro_step + k for k in range(SAMPLES)]
        # Replays in fp32 disable it.
        with restore_autocasts((("cpu", self.dtype),) if self.dtype != torch.float32 else ()):
            losses = self.checkpoint.losses(self.model, batch, RandomStreams(0, seeds)).losses
        if self.before_backward is not None and losses.requires_grad:
            losses.register_hook(lambda _gradient: self.before_backward())
        return losses

    def compute_terms(self) -> torch.Tensor:
        """The terms of the step's loss: each sample's loss divided by their number."""
        batches = self.make_micro_batches()
        losses = [self.compute_losses(batch, micro_step) for micro_step, batch in enumerate(batches)]
        return torch.cat(losses) / (self.num_micro_batches * SAMPLES)

    def run_backward(self, weights: Sequence[float] | None = None) -> None:
        """Accumulate the gradient of the step's loss; `weights` are those of the micro-batches, by default equal."""
        weights = weights or (1 / self.num_micro_batches,) * self.num_micro_batches
        self.optimizer.zero_grad(set_to_none=True)
        for micro_step, batch in enumerate(self.make_micro_batches()):
            (weights[micro_step] * self.compute_losses(batch, micro_step).mean()).backward()

    def make_replayable(self) -> ReplayableStep:
        """The present step, for a check."""
        batches = self.make_micro_batches()
        replays = [
            TinyBatch(ids=(), step=self.step, micro_step=k, rank=0, tensors=batch, training=self)
            for k, batch in enumerate(batches)
        ]
        return ReplayableStep(replays, self.model, self.dtype)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.run_backward()
            self.optimizer.step()
            self.step += 1

    def copy_gradients(self) -> dict[str, torch.Tensor]:
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in self.parameters.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class TinyBatch(MicroBatch):
    """A micro-batch that can be replayed."""

    training: TinyTraining

    def forward(self) -> LossOutput:
        losses = self.training.compute_losses(dict(self.tensors), self.micro_step)
        return LossOutput(losses, torch.full((len(losses),), -1))

    def select_sample(self, index: int) -> "TinyBatch":
        raise NotImplementedError("gradients are checked over whole steps")


def _convert_text(batch: Tensors, dtype: torch.dtype) -> Tensors:
    """Embeddings of captions in this dtype; masks and latents as they are."""
    return {
        name: tensor.to(dtype) if name.startswith(_TEXT_TENSORS) and tensor.is_floating_point() else tensor
        for name, tensor in batch.items()
    }


def _encode_samples(checkpoint: Checkpoint, family_name: str) -> list[Tensors]:
    """Micro-batches of encoded noise clips with captions."""
    encode_video = checkpoint.encoders.load_video_encoder(torch.float32, _CPU)
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, _CPU)
    generator = torch.Generator().manual_seed(2)
    # DiT's position embedding is that of square pictures.
    size = (_FRAMES.get(family_name, 1), 3, 64, 64 if family_name == "dit" else 96)
    rows = []
    for caption in _CLASSES.get(family_name, _CAPTIONS):
        text = {name: tensor[0] for name, tensor in encode_text([caption]).items()}
        pixels = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
        # Masks of ones, as of captions of equal length.
        text = {n: t if t.is_floating_point() else torch.ones_like(t) for n, t in text.items()}
        rows.append({**encode_video(pixels), **text})
    pairs = [rows[k : k + SAMPLES] for k in range(0, len(rows), SAMPLES)]
    return [{name: torch.stack([row[name] for row in pair]) for name in pair[0]} for pair in pairs]


def _shorten_text(batch: Tensors, num_tokens: int) -> Tensors:
    """The batch with the first tokens of its captions; their tensors are (B, tokens, ...)."""
    return {name: t[:, :num_tokens] if name.startswith(_TEXT_TENSORS) else t for name, t in batch.items()}
