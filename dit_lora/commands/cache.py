"""Implements `dit-lora cache`: fill, verify, count and prune the caches of clips, captions and samples of the base."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dit_lora.config.load import is_recipe, load_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.data.cache import maintenance
from dit_lora.data.cache.cache import TensorCache
from dit_lora.environment.progress_bar import ProgressBar, hide_progress_bars
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.numerics.precision import choose_precision
from dit_lora.training.session.session import start_run_session
from dit_lora.training.tasks.diffusion.base_samples import SAMPLES_CACHE, find_samples_of_prompts
from dit_lora.training.tasks.diffusion.cache_plan import make_cache_plan
from dit_lora.training.tasks.diffusion.precompute import precompute
from dit_lora.training.tasks.diffusion.second_model import open_sampling_checkpoint

_ENCODED_CACHES = ("videos", "texts")
_CACHE_NAMES = (*_ENCODED_CACHES, SAMPLES_CACHE)
_BYTE_FIELDS = ("bytes", "file_bytes", "freed")
_MAX_SHOWN_PROBLEMS = 50  # problems listed in a terminal; JSON has all

Caches = Mapping[str, TensorCache]


@dataclass(frozen=True)
class CacheCommandResult:
    """The result of verifying, counting or pruning each of the caches."""

    root: Path
    results: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """True if no cache entry is bad, or all bad entries were set aside."""
        return all(
            # Bad entries that were not set aside remain in the cache.
            len(getattr(result, "problems", [])) <= getattr(result, "set_aside", 0)
            for result in self.results.values()
        )

    def record(self) -> dict[str, Any]:
        """Result of a cache command as JSON-compatible values; paths are relative to the cache."""
        halves = {kind: _convert_paths(asdict(result), self.root) for kind, result in self.results.items()}
        return {"cache": str(self.root), **halves}

    def format_text(self) -> str:
        """Result of a cache command as text for the terminal."""
        lines: list[str] = []
        for kind, values in self.record().items():
            if isinstance(values, dict):
                lines += _format_cache(kind, values)
        return "\n".join(lines)


def build_cache(target: str, overrides: Sequence[str]) -> None:
    """Fill a recipe's cache as training would, with all processes of the launch."""
    if not is_recipe(target):
        raise DitLoraError(f"cache build needs a recipe (.yaml); got {target}")
    recipe = load_recipe(target, overrides)
    _require_cache(recipe)
    if not recipe.data.precompute:
        raise DitLoraError("data.precompute is false, so this recipe trains without a cache; remove it to build one")
    checkpoint = get_family(recipe.model.family).open(recipe.model, recipe)
    with start_run_session(recipe) as session:
        encoded = precompute(session, checkpoint, open_sampling_checkpoint(recipe, checkpoint))
        count = len(encoded.training_set.entries)
        session.say(f"{recipe.cache_dir} has everything for {count} samples")


def verify_cache(target: str, overrides: Sequence[str], *, mark_bad: bool) -> CacheCommandResult:
    """Read every entry of the caches and check its digest and values."""

    def verify_entries(cache: TensorCache, on_progress: maintenance.OnProgress) -> maintenance.VerifiedCache:
        return maintenance.verify_cache(cache, mark_bad=mark_bad, on_progress=on_progress)

    return _maintain_caches(target, overrides, "checking", verify_entries)


def count_cache_entries(target: str, overrides: Sequence[str]) -> CacheCommandResult:
    """Count a cache's entries, shards and bytes. Reads only headers."""

    def count_entries(cache: TensorCache, _: maintenance.OnProgress) -> maintenance.CacheStats:
        stats = maintenance.compute_stats(cache)
        if cache.root.name == SAMPLES_CACHE:
            # Files, each with a length of its own.
            stats.kinds = {}
        return stats

    return _maintain_caches(target, overrides, "counting", count_entries)


def prune_cache(target: str, overrides: Sequence[str], *, keep: Sequence[str]) -> CacheCommandResult:
    """Remove unusable cache entries and, if `keep` has recipes, entries that none of them uses."""
    # Read all recipes first: an error must not stop after a part of the cache is pruned.
    recipes = [load_recipe(path) for path in keep]
    # For each recipe, the used keys by name of the cache.
    keys_of_each = []
    for recipe in recipes:
        _require_cache(recipe)
        hide_progress_bars()
        checkpoint = get_family(recipe.model.family).open(recipe.model, recipe)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # Keys contain the dtype of encoding, which depends on this machine.
        dtype = choose_precision(recipe.model.dtype, device).dtype
        second = open_sampling_checkpoint(recipe, checkpoint)
        second_encoders = None if second is None else second.encoders
        plan = make_cache_plan(
            recipe, checkpoint.encoders, dtype, samples_per_step=1, quiet=False, sampling_encoders=second_encoders
        )
        keys_of_each.append(dict(zip(_ENCODED_CACHES, plan.keys, strict=True)))

    def prune_entries(cache: TensorCache, on_progress: maintenance.OnProgress) -> maintenance.PruneResult:
        if not keep:
            return maintenance.prune_cache(cache, on_progress=on_progress)
        # Recipes may share the cache: an entry stays if any of them uses it.
        if cache.root.name == SAMPLES_CACHE:
            used_keys = find_samples_of_prompts(cache, set().union(*(keys["texts"] for keys in keys_of_each)))
        else:
            used_keys = set().union(*(keys[cache.root.name] for keys in keys_of_each))
        return maintenance.prune_cache(cache, used_keys, on_progress=on_progress)

    return _maintain_caches(target, overrides, "pruning", prune_entries)


def _require_cache(recipe: Recipe) -> None:
    if recipe.model.family in CHAT_FAMILIES:
        raise DitLoraError(f"family {recipe.model.family}: conversations are not cached, so there is nothing to build")


def _maintain_caches(
    target: str,
    overrides: Sequence[str],
    verb: str,
    process_cache: Callable[[TensorCache, maintenance.OnProgress], Any],
) -> CacheCommandResult:
    """Apply `process_cache` to each of the caches, with a progress bar."""
    # All caches are worked through, even if the first one has problems.
    root = _resolve_cache_root(target, overrides)
    results = {}
    for kind in _CACHE_NAMES:
        with _show_progress(f"{verb} {kind}") as tell:
            results[kind] = process_cache(TensorCache(root / kind), tell)
    return CacheCommandResult(root, results)


def _resolve_cache_root(target: str, overrides: Sequence[str]) -> Path:
    """The cache folder of a recipe, or the folder itself. Raises `DitLoraError` if it is not a cache."""
    if is_recipe(target):
        root = load_recipe(target, overrides).cache_dir
    elif overrides:
        raise DitLoraError(f"key.path=value needs a recipe (.yaml); got {target}")
    else:
        root = Path(target).expanduser()
    # Check before anything is pruned: a wrong path must not look like an empty cache.
    if not any((root / kind).is_dir() for kind in _ENCODED_CACHES):
        raise DitLoraError(f"{root} is not a cache: it lacks the folders {' and '.join(_ENCODED_CACHES)}")
    return root


@contextmanager
def _show_progress(description: str) -> Iterator[maintenance.OnProgress]:
    """Progress bar over shards; yields the function that updates it."""
    with ProgressBar(desc=description, unit="shard", delay=1) as bar:

        def update_progress(num_done: int, total: int) -> None:
            bar.total = total
            # tqdm takes the increment, not the total so far.
            bar.update(num_done - bar.n)

        yield update_progress


def _convert_paths(value: Any, root: Path) -> Any:
    """Convert paths to strings, relative to `root` if they are inside, in nested dicts and lists."""
    # Files outside of the cache keep their full path.
    if isinstance(value, Path):
        return value.relative_to(root).as_posix() if value.is_relative_to(root) else str(value)
    if isinstance(value, dict):
        return {key: _convert_paths(item, root) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_paths(item, root) for item in value]
    return value


def _format_cache(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a cache report.

    They are every count, then the sizes of each kind of tensor, then the first problems.
    """
    counts = []
    for field, value in values.items():
        # The terminal shows a list as its number of items.
        if isinstance(value, list):
            value = len(value)
        if isinstance(value, int):
            text = f"{value / 2**20:,.1f} MiB" if field in _BYTE_FIELDS else f"{value:,}"
            counts.append(f"{field.replace('_', ' ')} {text}")
    yield f"{name}: {', '.join(counts)}"
    for kind, (count, size) in values.get("kinds", {}).items():
        yield f"  {count:,} of {kind}: {size / 2**20:,.1f} MiB"
    problems = values.get("problems", [])
    for entry in problems[:_MAX_SHOWN_PROBLEMS]:
        entry_name = entry["sample"] or entry["key"]
        # A shard that cannot be read has no entry to name; the message names the file.
        location = f"{entry_name} in {entry['path']}: " if entry_name else ""
        yield f"  {entry['kind']}: {location}{entry['words']}"
    if len(problems) > _MAX_SHOWN_PROBLEMS:
        yield f"  and {len(problems) - _MAX_SHOWN_PROBLEMS} more; --json lists all"
