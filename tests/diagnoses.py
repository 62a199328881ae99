"""Micro-batches of a small model with faults in them, and what a diagnosis says of them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from micro_batches import FakeContext, fake_batch
from torch import nn

from dit_lora.guard.diagnose import diagnose
from dit_lora.guard.diagnosis import Diagnosis
from dit_lora.guard.fallbacks import Fallback
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.labels import IGNORE_INDEX
from dit_lora.numerics.objectives import LossOutput

Tensors = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]
IDS, TIMESTEPS = ("a.mp4", "b.mp4", "c.mp4"), (901, 17, 440)


def fails(values: torch.Tensor) -> torch.Tensor:
    return values / 0


class Block(nn.Module):
    """What is done to the activations; a fault is put here."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Change | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.fault is None else self.fault(values)


class Net(nn.Module):
    """A frozen base and a trained pair of low rank beside it, as LoRA is; then a block."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(19)
        self.base = nn.Linear(6, 6).requires_grad_(False).to(dtype)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.block = Block()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        dtype = self.base.weight.dtype
        adapted = self.up(self.down(values.float())).to(dtype)
        return self.block(self.base(values.to(dtype)) + adapted).float()


def rows() -> Tensors:
    """Three different samples; the prompt's second half is padding."""
    draws = torch.Generator().manual_seed(6)
    return {
        "latents": torch.randn(3, 6, generator=draws),
        "prompt_embeds": torch.randn(3, 4, 6, generator=draws),
        "labels": torch.tensor([[5, IGNORE_INDEX], [IGNORE_INDEX, 7], [3, 9]]),
    }


def batch(
    model: nn.Module,
    tensors: Tensors | None = None,
    ids: tuple[str, ...] = IDS,
    *,
    loss: Change = lambda losses: losses,
    noise: torch.Tensor | float = 0.1,
    **facts: Any,
) -> MicroBatch:
    """The model on the samples of these ids, of which `IDS` says the rows."""
    tensors = tensors or rows()
    indices = [IDS.index(sample_id) for sample_id in ids]
    own_rows = {name: tensor[indices] for name, tensor in tensors.items()}

    def forward() -> LossOutput:
        output = model(own_rows["latents"] + own_rows["prompt_embeds"].mean(1) + noise)
        losses = loss((output - own_rows["latents"]).square().mean(1))
        return LossOutput(losses, torch.tensor(TIMESTEPS)[indices])

    def again(*_moved: object) -> MicroBatch:
        return batch(model, tensors, ids, loss=loss, noise=noise, **facts)

    def single(index: int) -> MicroBatch:
        return batch(model, tensors, (ids[index],), loss=loss, noise=noise, **facts)

    changes = {"redrawn": again, "moved": again, **facts}
    return fake_batch(ids, 12, 1, 2, own_rows, forward, single, **changes)


def diagnosed(given: MicroBatch, model: nn.Module, *, kind: str = "non_finite_loss", **facts: Any) -> Diagnosis:
    """The verdict, whose record every JSON reader can read."""
    control = facts.pop("control", None)
    suspects = FakeContext(model=model, **facts)
    verdict = diagnose(given, suspects, kind=kind, control=control)
    assert (verdict.step, verdict.micro_step, verdict.rank) == (12, 1, 2)
    record = json.loads(json.dumps(verdict.to_record(), allow_nan=False))
    assert (record["cause"], record["sample_ids"]) == (verdict.cause, [*verdict.sample_ids])
    return verdict


def switch(block: Block, name: str = "norm", cause: str = "kernel") -> Fallback:
    """Off, the block's fault is gone."""

    @contextmanager
    def off() -> Iterator[None]:
        fault, block.fault = block.fault, None
        yield
        block.fault = fault

    return Fallback(f"{cause}:{name}", cause, off, lambda: None, "eager mode")


def overflows_at_large_values(model: Net) -> Tensors:
    """Finite samples of which the second alone is too large for the block, in any dtype."""
    model.block.fault = lambda values: values.exp() * 1e-4
    tensors = rows()
    tensors["latents"][1] *= 5e3
    return tensors
