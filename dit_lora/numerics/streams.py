"""Named random streams: every draw is a function of (seed, stream, sample, epoch), never of history.

A sample's name and the epoch give its *draw number*, which seeds generators for this sample only. So a single
micro-batch can be replayed, a resumed run draws the numbers of the uninterrupted one, and neither the split of a
batch over micro-steps and ranks nor the absence of another sample changes a draw.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

Draws = Mapping[str, Callable[[Sequence[torch.Generator]], torch.Tensor]]
"""Functions that draw a step's random numbers, by stream name; each uses a fresh CPU generator per sample."""


def fold(seed: int, stream: str, *place: int | str) -> int:
    """A 63-bit seed for one stream: a hash of all arguments."""
    # A cryptographic hash: streams of neighbouring seeds or epochs have nothing in common.
    text = "/".join([str(seed), stream, *map(str, place)])
    # 63 bits, so that the seed fits a signed 64-bit integer.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, stream: str, *place: int | str) -> torch.Generator:
    """A CPU generator seeded for one stream.

    It is always on the CPU, so that a GPU run can be replayed on a CPU.
    """
    # PyTorch's CPU generator uses the low 32 bits of its seed.
    return torch.Generator("cpu").manual_seed(fold(seed, stream, *place) & 0xFFFFFFFF)


@dataclass(frozen=True)
class Drawn:
    """Random numbers drawn in advance, by stream, each (B, ...). Valid only for this seed and these draw numbers."""

    seed: int
    draws: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Drawn":
        """A copy with `change` applied to every tensor, for instance to move them to another device."""
        # The seeds stay, so the copy is valid for the same samples.
        return replace(self, tensors={name: change(t) for name, t in self.tensors.items()})

    def single(self, index: int) -> "Drawn":
        """The draws of the sample at this index."""
        # (1, ...): the batch dimension stays.
        sample = self.each(lambda tensor: tensor[index : index + 1])
        return replace(sample, draws=(self.draws[index],))


class Streams:
    """The generators of one micro-batch: `streams("noise")` gives one fresh generator per sample.

    `ahead` holds numbers drawn in advance. They are used if seed and draw numbers match, and drawn again otherwise.
    """

    def __init__(self, seed: int, draws: Sequence[int], ahead: Drawn | None = None) -> None:
        self.seed = seed
        self.draws = tuple(draws)
        # They do not match, for instance, after a sample was drawn again; then the numbers are computed here.
        is_valid = ahead is not None and (ahead.seed, ahead.draws) == (self.seed, self.draws)
        self._ahead = ahead.tensors if ahead is not None and is_valid else {}

    def __call__(self, stream: str) -> list[torch.Generator]:
        return [generator(self.seed, stream, draw) for draw in self.draws]

    def drawn(self, draws: Draws, device: torch.device) -> dict[str, torch.Tensor]:
        """The random numbers of all streams on a device, from `ahead` if it has them and drawn now otherwise. The bits
        are equal either way.
        """
        return {
            name: moved(self._ahead[name] if name in self._ahead else draw(self(name)), device)
            for name, draw in draws.items()
        }


def moved(draws: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move draws to a device without a synchronization; a GPU reads them from pinned memory."""
    if device.type == "cuda" and not draws.is_cuda:
        # From pageable memory, `non_blocking` has no effect.
        draws = draws.pin_memory()
    return draws.to(device, non_blocking=True)


def normal(shape: Sequence[int], generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Standard normal noise, fp32 (B, *shape) on the CPU, each row from its own generator."""
    # One call for each sample: the batch size must not change a sample's numbers.
    return torch.stack([torch.randn(tuple(shape), generator=row) for row in generators])


def integers(low: int, high: int, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Uniform int64 draws from low..high-1, of shape (B,), each from its own generator."""
    return torch.cat([torch.randint(low, high, (1,), generator=row) for row in generators])
