"""Lists the clips of `validation.data`, which are never trained on, together with those of the training data."""

from collections.abc import Sequence
from dataclasses import replace

from dit_lora.config.recipe import Recipe
from dit_lora.data.sources.clips import Clip, DataScan
from dit_lora.data.sources.scan import make_id_prefixes, scan_sources
from dit_lora.errors import DitLoraError, join_first_items
from dit_lora.numerics.streams import derive_seed

_ID_PREFIX = "validation.data/"
"""Start of the ids of a validation folder's clips, which may have the names of training clips."""
_MAX_NAMED = 8


def scan_recipe(recipe: Recipe) -> DataScan:
    """List every clip of the data sources and of `validation.data`, whose clips have `is_held_out`.

    Raises:
        DitLoraError: A source cannot be read, or a share leaves no clip to train on or none to validate on.
    """
    scanned, data = scan_sources(recipe.data, recipe.cache_dir), recipe.validation.data
    if data is None:
        return scanned
    if isinstance(data, float):
        # Without any clip, the problems of all of them are reported instead.
        clips = _hold_out_clips(scanned.clips, recipe, data) if scanned.clips else []
        problems, notes = scanned.problems, scanned.notes
    else:
        folder = _scan_folder(recipe, data)
        clips = [*scanned.clips, *folder.clips]
        problems, notes = [*scanned.problems, *folder.problems], (*scanned.notes, *folder.notes)
    names = [clip.id for clip in clips if clip.is_held_out]
    first_names = join_first_items(names, _MAX_NAMED)
    note = f"validation.data: {len(names)} of {len(clips)} clips are not trained on: {first_names}"
    return DataScan(clips, problems, (*notes, note))


def _scan_folder(recipe: Recipe, path: str) -> DataScan:
    """Read a folder of `validation.data` with the options of the data section, as held-out clips."""
    try:
        scanned = scan_sources(recipe.data.model_copy(update={"path": path, "sources": ()}), recipe.cache_dir)
    except DitLoraError as error:
        # The message is about the training data's path, and suggests to change it.
        raise DitLoraError(str(error).replace("data.path", "validation.data")) from error
    clips = [replace(clip, id=_ID_PREFIX + clip.id, is_held_out=True) for clip in scanned.clips]
    # A problem belongs to the sample of the same id.
    problems = [replace(problem, file=_ID_PREFIX + problem.file) for problem in scanned.problems]
    return DataScan(clips, problems, scanned.notes)


def _hold_out_clips(clips: Sequence[Clip], recipe: Recipe, share: float) -> list[Clip]:
    """Mark the clips whose names have a hash below `share` of all hashes: other files do not change the choice."""
    prefixes = zip(recipe.data.sources, make_id_prefixes(recipe.data.sources), strict=True)
    # The base's own pictures (prior preservation) say nothing about new data.
    generated = tuple(prefix for source, prefix in prefixes if source.generate is not None)
    # From 0 to 1, by name; the seed of a run does not matter, so that runs can be compared.
    positions = {
        clip.id: derive_seed(0, "validation.data", clip.id) / 2**63
        for clip in clips
        if not clip.id.startswith(generated)
    }
    ranked = sorted(positions.values())
    if len(ranked) < 2:
        raise DitLoraError(
            f"validation.data={share:g} needs two samples or more, one of them to train on; the data has {len(ranked)}"
        )
    count = sum(position < share for position in ranked)
    if count in (0, len(ranked)):
        lower, upper = ranked[:2] if count == 0 else ranked[-2:]
        raise DitLoraError(
            f"validation.data={share:g} holds out {count} of {len(ranked)} samples, chosen by a hash of their names; "
            f"{(lower + upper) / 2:.4g} holds out {1 if count == 0 else count - 1}, or give a folder of other samples"
        )
    return [replace(clip, is_held_out=positions.get(clip.id, 1) < share) for clip in clips]
