"""Encoded clips and captions on disk: keyed by the content of what made them, checked, written whole.

One safetensors file an entry. Its key is the digest of everything that its tensors depend on, so a changed
video, caption, checkpoint, dtype or shape is another entry and nothing is ever stale. Its header carries the
digest of its bytes. Values are checked finite and in range when written and when read.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.numerics.finite import describe_all

# Far above a VAE posterior or a normalised text embedding, and below where fp16 ends (65504).
MAX_ABS = 1e4

_DTYPES = {  # safetensors' names
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "BOOL": torch.bool,
}

Spec = dict[str, tuple[torch.Size, torch.dtype]]


class CacheError(DitLoraError):
    """An encoder gave a value that must not be cached; the message names sample and tensor."""


def entry_key(facts: Mapping[str, Any]) -> str:
    """Hex digest of facts that JSON can hold; equal facts, equal key."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class TensorCache:
    """Entries of one kind below a folder; safe for several processes that write the same entry."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.safetensors"

    def is_whole(self, key: str) -> bool:
        """Whether the entry is there with all its bytes; contents are checked by `read`."""
        try:
            with safe_open(self.path(key), framework="pt") as entry:
                return "digest" in (entry.metadata() or {})
        except (OSError, SafetensorError):
            return False

    def spec(self, key: str) -> Spec:
        """Shapes and dtypes of an entry's tensors, from its header."""
        with safe_open(self.path(key), framework="pt") as entry:
            empty = {name: entry.get_slice(name) for name in entry.keys()}  # noqa: SIM118
            return {
                name: (torch.Size(part.get_shape()), _DTYPES[part.get_dtype()])
                for name, part in empty.items()
            }

    def first_spec(self, keys: Sequence[str]) -> Spec:
        """The spec of the first of these entries that can be read."""
        for key in keys:
            if self.is_whole(key):
                return self.spec(key)
        raise DitLoraError(f"no entry of the cache in {self.root} can be read; start again")

    def write(
        self,
        key: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        sample: str,
        facts: Mapping[str, Any],
    ) -> None:
        """Check the tensors and write them by one rename; raises `CacheError` naming `sample`."""
        bad = describe_all(tensors, MAX_ABS)
        if bad:
            raise CacheError(f"{sample}: the encoder's output is not usable: {bad}")
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {
            "digest": _digest(kept),
            "sample": sample,
            "facts": json.dumps(facts, sort_keys=True),
        }
        try:
            write_whole(self.path(key), save(kept, metadata))
        except OSError as error:
            raise DitLoraError(
                f"cannot write the cache entry of {sample} in {self.root}: {error.strerror}; "
                "free space or set data.cache; entries already written are whole"
            ) from error

    def read(self, key: str, spec: Spec) -> tuple[dict[str, torch.Tensor], str | None]:
        """The tensors and what is wrong with them, in words, or None.

        A bad entry does not raise: in a distributed run only one rank reads it, and all ranks must stop
        together, which the gate sees to. An entry that cannot be read is given as NaN of shape `spec`.
        """
        try:
            tensors, digest = self._load(key)
        except (OSError, SafetensorError) as error:
            lost = {
                name: torch.full(shape, torch.nan if d.is_floating_point else 0, dtype=d)
                for name, (shape, d) in spec.items()
            }
            return lost, f"its cache entry {self.path(key)} cannot be read: {error}"
        bad = describe_all(tensors, MAX_ABS)
        if bad:
            return tensors, f"in its cache entry {self.path(key)}, {bad}"
        if digest != _digest(tensors):
            return (
                tensors,
                f"its cache entry {self.path(key)} is not what was written (digest differs)",
            )
        return tensors, None

    def set_aside(self, key: str) -> Path:
        """Rename a bad entry out of the way, so that the next start builds it anew."""
        path = self.path(key)
        aside = path.with_suffix(".bad")
        if path.exists():
            path.replace(aside)
        return aside

    def _load(self, key: str) -> tuple[dict[str, torch.Tensor], str | None]:
        with safe_open(self.path(key), framework="pt") as entry:
            tensors = {name: entry.get_tensor(name) for name in entry.keys()}  # noqa: SIM118
            return tensors, (entry.metadata() or {}).get("digest")


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
