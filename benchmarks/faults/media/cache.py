"""Damage to an entry of the cache after it was written: values, bytes, a file that is cut."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dit_lora.data.cache.cache import TensorCache
from dit_lora.data.cache.shards import StoredEntry

_AT = 7  # the number of the first value that is overwritten


@dataclass(frozen=True)
class Damage:
    """One damage to an entry where it lies on the disk."""

    name: str
    do: Callable[[StoredEntry], None]
    code: str
    """A finding that the entry's sample must have."""
    seems_whole: bool = True
    """True if the entry still seems to be there, so that only reading it tells."""
    reaches_neighbour: bool = False
    """True if the entries before it in its shard are lost too."""


def overwrite(entry: StoredEntry, name: str, first_index: int, values: torch.Tensor) -> None:
    """Put values into a tensor of an entry where it lies on the disk, from the element of number `first` on."""
    dtype = entry.layout.spec[name][1]
    with entry.path.open("r+b") as file:
        file.seek(entry.start + entry.layout.tensor_byte_ranges[name][0] + first_index * dtype.itemsize)
        file.write(values.to(dtype).view(torch.uint8).numpy().tobytes())


def poisoned(tensor: str, value: float, count: int = 1) -> Callable[[StoredEntry], None]:
    """A change that writes bad values into a tensor.

    If the family names its caption tensors differently than `prompt_embeds`, it takes the first float tensor.
    """

    def change(entry: StoredEntry) -> None:
        spec = entry.layout.spec
        floats = (name for name, (_, dtype) in spec.items() if dtype.is_floating_point)
        name = tensor if tensor in spec else next(floats)
        overwrite(entry, name, _AT, torch.full((count,), value))

    return change


def damaged(folder: str, aim: str, do: Callable[[StoredEntry], None]) -> Callable[[Path], None]:
    """Apply `do` to each cache entry whose sample ID or caption contains `aim`."""

    def change(cache: Path) -> None:
        for entry in TensorCache(cache / folder).iter_entries():
            if aim in entry.sample:
                do(entry)

    return change


def flip(entry: StoredEntry) -> None:
    """Flip one byte of a value: it is finite, and not what was written."""
    with entry.path.open("r+b") as file:
        file.seek(entry.end - 5)
        (byte,) = file.read(1)
        file.seek(entry.end - 5)
        file.write(bytes([byte ^ 0xFF]))


def cut(entry: StoredEntry) -> None:
    """Truncate the entry's shard in the middle of it."""
    with entry.path.open("r+b") as file:
        file.truncate((entry.start + entry.end) // 2)


def empty(entry: StoredEntry) -> None:
    """Leave no bytes in the entry's shard, as after a full disk."""
    entry.path.write_bytes(b"")


def scramble(entry: StoredEntry) -> None:
    """Overwrite the header of the entry's shard with bytes that are not JSON."""
    with entry.path.open("r+b") as file:
        # After the 8 bytes of its length and the opening brace.
        file.seek(9)
        file.write(b"\xff" * 16)


DAMAGES: tuple[Damage, ...] = (
    *(
        Damage(f"{description} in a cached {tensor}", poisoned(tensor, value), f"{part}_{kind}")
        for description, value, kind in (
            ("NaN", torch.nan, "non_finite"),
            ("Inf", torch.inf, "non_finite"),
            ("-Inf", -torch.inf, "non_finite"),
            ("a huge value", 3e30, "out_of_range"),
        )
        for tensor, part in (("latent_mean", "latent"), ("prompt_embeds", "embedding"))
    ),
    Damage("a flipped byte", flip, "cache_damaged"),
    Damage("a torn shard", cut, "cache_damaged", seems_whole=False),
    Damage("an empty shard", empty, "cache_damaged", seems_whole=False, reaches_neighbour=True),
    Damage("a shard with a damaged header", scramble, "cache_damaged", seems_whole=False, reaches_neighbour=True),
)
