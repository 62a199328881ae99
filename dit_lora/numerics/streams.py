"""Named random streams: every draw is a function of (seed, stream, sample, epoch), never of history.

A sample's name and the epoch give its *sample seed*, which seeds generators for this sample only. So a single
micro-batch can be replayed, a resumed run draws the numbers of the uninterrupted one, and neither the split of a
batch over micro-steps and ranks nor the absence of another sample changes a draw.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

DrawFunctions = Mapping[str, Callable[[Sequence[torch.Generator]], torch.Tensor]]
"""Functions that draw a step's random numbers, by stream name; each uses a fresh CPU generator per sample."""


def derive_seed(seed: int, stream: str, *keys: int | str) -> int:
    """A 63-bit random seed, derived by a hash of all arguments."""
    # A cryptographic hash: streams of neighbouring seeds or epochs have nothing in common.
    text = "/".join([str(seed), stream, *map(str, keys)])
    # 63 bits, so that the seed fits a signed 64-bit integer.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def make_generator(seed: int, stream: str, *keys: int | str) -> torch.Generator:
    """A CPU generator for one stream of random numbers.

    It is always on the CPU, so that a GPU run can be replayed on a CPU.
    """
    # PyTorch's CPU generator uses the low 32 bits of its seed.
    return torch.Generator("cpu").manual_seed(derive_seed(seed, stream, *keys) & 0xFFFFFFFF)


@dataclass(frozen=True)
class RandomInputs:
    """Random numbers that were drawn before a step, by stream, each (B, ...).

    Valid only for this seed and these samples' seeds.
    """

    seed: int
    sample_seeds: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "RandomInputs":
        """Copy pre-drawn random numbers, with `function` applied to every tensor, for instance to move them."""
        # The seeds stay, so the copy is valid for the same samples.
        return replace(self, tensors={name: function(t) for name, t in self.tensors.items()})

    def select_sample(self, index: int) -> "RandomInputs":
        """The pre-drawn random numbers of the sample at this index, with a batch dimension of 1."""
        # (1, ...): the batch dimension stays.
        sample = self.map_tensors(lambda tensor: tensor[index : index + 1])
        return replace(sample, sample_seeds=(self.sample_seeds[index],))


class RandomStreams:
    """The generators of one micro-batch: `streams("noise")` gives one fresh generator per sample.

    `prefetched` holds numbers drawn in advance. They are used if seed and sample seeds match, and drawn again
    otherwise.
    """

    def __init__(self, seed: int, sample_seeds: Sequence[int], prefetched: RandomInputs | None = None) -> None:
        self.seed = seed
        self.sample_seeds = tuple(sample_seeds)
        # They do not match, for instance, after a sample was drawn again; then the numbers are computed here.
        self._prefetched: Mapping[str, torch.Tensor] = {}
        if prefetched is not None and (prefetched.seed, prefetched.sample_seeds) == (self.seed, self.sample_seeds):
            self._prefetched = prefetched.tensors

    def __call__(self, stream: str) -> list[torch.Generator]:
        return [make_generator(self.seed, stream, sample_seed) for sample_seed in self.sample_seeds]

    def draw_random_tensors(self, functions: DrawFunctions, device: torch.device) -> dict[str, torch.Tensor]:
        """The random numbers of all streams on a device: from `prefetched`, or drawn now with the same bits."""
        return {
            name: move_to_device(self._prefetched[name] if name in self._prefetched else draw(self(name)), device)
            for name, draw in functions.items()
        }


def move_to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move random numbers to a device without a synchronization; a GPU reads them from pinned memory."""
    if device.type == "cuda" and not values.is_cuda:
        # From pageable memory, `non_blocking` has no effect.
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def draw_normal_noise(shape: Sequence[int], generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Standard normal noise, fp32 (B, *shape) on the CPU, each row from its own generator."""
    # One call for each sample: the batch size must not change a sample's numbers.
    return torch.stack([torch.randn(tuple(shape), generator=row) for row in generators])


def draw_uniform(generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Uniform fp32 draws from [0, 1), of shape (B,), each from its own generator."""
    return torch.cat([torch.rand(1, generator=row) for row in generators])


def draw_integers(low: int, high: int, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Uniform int64 draws from low..high-1, of shape (B,), each from its own generator."""
    return torch.cat([torch.randint(low, high, (1,), generator=row) for row in generators])
