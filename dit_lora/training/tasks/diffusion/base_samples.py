"""Keeps samples of the base in the cache folder: runs on an equal base write them again without generating them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL
import torch

from dit_lora.data.cache.cache import TensorCache, encode_entry, make_entry_key
from dit_lora.data.cache.digests import Digests
from dit_lora.data.cache.shards import EncodedEntry, list_shards
from dit_lora.environment.pipeline_index import INDEX_FILE, find_index_file
from dit_lora.environment.versions import probe_environment
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Checkpoint, Sampling
from dit_lora.files import read_json, write_atomically
from dit_lora.guard.fallbacks import list_attention_fallbacks
from dit_lora.numerics.dtensors import has_collective_forward
from dit_lora.training.check_cache import REMEASURE, build_model_facts, describe_active_kernels
from dit_lora.training.task import Setup
from dit_lora.training.tasks.diffusion.precompute import DiffusionTrainingData

SAMPLES_CACHE = "samples"
"""Name of the folder in `data.cache`. Its entries are the files as they were written, not tensors."""
_PROMPT_FACT = "prompt"
"""Fact of an entry with the keys of its prompt and its empty prompt in the cache of captions."""
_SUFFIXES = {"mp4", "png"}
"""Names that an entry's tensor can have: the suffix of its file."""
_DATA_OPTIONS = {"sound", "reference_resolution", "image_noise", "vae_tiling", "vae_slicing"}
"""Options of `data` that pipelines depend on, besides those of each sample."""
MAX_CACHE_BYTES = 2**28
"""Samples above this are removed from the cache, the oldest first."""


@dataclass
class BaseSampleCache:
    """The cached samples of a base, and those that this run adds."""

    cache: TensorCache
    facts: Sequence[Mapping[str, Any]]
    """Everything that each sample's file depends on, in the order of the samples."""
    new_entries: list[EncodedEntry] = field(default_factory=list)

    def restore_cached_sample(self, index: int, path: Path) -> bool:
        """Write a cached sample to `path` plus its suffix; False if the cache does not have it, or it is damaged."""
        key = make_entry_key(self.facts[index])
        if not self.cache.is_complete(key):
            return False
        tensors, fault = self.cache.read(key, {})
        if fault is not None or not tensors.keys() <= _SUFFIXES:
            # An undamaged copy of it will be written.
            self.cache.mark_bad(key)
            return False
        # One tensor: the bytes of the file.
        for suffix, data in tensors.items():
            write_atomically(path.with_suffix(f".{suffix}"), data.numpy().tobytes())
        return True

    def mark_cached_samples_bad(self) -> None:
        """Mark the cached samples as bad, so that they are generated again."""
        for key in map(make_entry_key, self.facts):
            if self.cache.is_complete(key):
                self.cache.mark_bad(key)

    def add_new_sample(self, index: int, file: Path) -> None:
        """Remember a new sample's file until `write_new_samples` is called."""
        data = torch.from_numpy(np.fromfile(file, dtype=np.uint8))
        facts = self.facts[index]
        tensors = {file.suffix.removeprefix("."): data}
        self.new_entries.append(encode_entry(make_entry_key(facts), tensors, sample=f"sample {index}", facts=facts))

    def write_new_samples(self) -> None:
        """Write the new samples to the cache, and remove the oldest ones if it gets too large."""
        if not self.new_entries:
            return
        # The run has its samples: without a place in the cache, the next run generates them again.
        with suppress(DitLoraError, OSError):
            self.cache.write_entries(self.new_entries)
            _remove_oldest_shards(self.cache.root)


def open_base_samples(
    setup: Setup[DiffusionTrainingData, Checkpoint], samplings: Sequence[Sampling]
) -> BaseSampleCache | None:
    """The cached samples of this run's base, with the keys of these `samplings`; None if equality is not certain.

    Call it on the main process, while the adapter has no effect.
    """
    recipe = setup.recipe
    # The key does not tell how weights are sharded, what compiled or fp8 code was replaced with, or another adapter.
    if (
        has_collective_forward(setup.model)
        or recipe.train.compile
        or recipe.kernels.fp8 != "off"
        or recipe.validation.other_expert is not None
    ):
        return None
    # The files were hashed when captions and clips were encoded, so that their digests are known.
    digests = Digests(recipe.cache_dir / "digests.json")
    shared_facts = _build_shared_facts(setup, digests)
    # Each prompt is sampled with `validation.count` seeds in a row.
    prompt_keys = [keys for keys in setup.data.prompt_keys for _ in range(recipe.validation.count)]
    facts = [
        {**shared_facts, _PROMPT_FACT: list(keys), "sampling": _describe_sampling(sampling, digests)}
        for keys, sampling in zip(prompt_keys, samplings, strict=True)
    ]
    digests.save()
    samples = BaseSampleCache(TensorCache(recipe.cache_dir / SAMPLES_CACHE), facts)
    if recipe.guard.preflight == REMEASURE:
        samples.mark_cached_samples_bad()
    return samples


def find_samples_of_prompts(cache: TensorCache, text_keys: set[str]) -> set[str]:
    """Keys of the samples whose prompt and empty prompt are among `text_keys`, the keys of cached captions."""
    return {entry.key for entry in cache.iter_entries() if text_keys.issuperset(entry.facts[_PROMPT_FACT])}


def _build_shared_facts(setup: Setup[DiffusionTrainingData, Checkpoint], digests: Digests) -> dict[str, Any]:
    recipe, checkpoint = setup.recipe, setup.data.sampling_checkpoint or setup.checkpoint
    index = find_index_file(checkpoint.info.path) or checkpoint.info.path / INDEX_FILE
    # By content, so that a moved checkpoint keeps its samples.
    folders = [index.with_name(name) for name in read_json(index)]
    components = {folder.name: digests.hash_component(folder) for folder in folders if folder.is_dir()}
    return {
        "what": "sample of the base",
        **build_model_facts(setup),
        # Libraries outside of Python round differently, and encode to other bytes.
        "platform": probe_environment().platform,
        "pillow": PIL.__version__,
        "codecs": {name: list(version) for name, version in av.library_versions.items()},
        # The order of sums in a CPU's products.
        "threads": torch.get_num_threads(),
        "checkpoint": {**components, index.name: digests.hash_file(index)},
        "model": recipe.model.model_dump(mode="json", exclude={"path", "revision"}),
        "under": setup.data.adapters.get("under"),
        # Preflight may have switched some off.
        "active kernels": describe_active_kernels(setup),
        "attention": [fallback.name for fallback in list_attention_fallbacks()],
        "data": recipe.data.model_dump(mode="json", include=_DATA_OPTIONS),
    }


def _describe_sampling(sampling: Sampling, digests: Digests) -> dict[str, Any]:
    """A sample's settings as JSON values, with its files by content."""

    def hash_files(value: Any) -> Any:
        if isinstance(value, Path):
            return digests.hash_file(value)
        return [hash_files(item) for item in value] if isinstance(value, tuple) else value

    return {name: hash_files(value) for name, value in asdict(sampling).items()}


def _remove_oldest_shards(folder: Path) -> None:
    """Remove whole shards, the oldest first, until the folder has at most `MAX_CACHE_BYTES`."""
    states = sorted(((shard.stat(), shard) for shard in list_shards(folder)), key=lambda pair: pair[0].st_mtime_ns)
    size = sum(state.st_size for state, _ in states)
    for state, shard in states:
        if size <= MAX_CACHE_BYTES:
            return
        shard.unlink(missing_ok=True)
        size -= state.st_size
