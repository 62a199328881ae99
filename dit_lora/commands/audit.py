"""Audits a folder, or all that a recipe trains on: sources, media, captions or labels, buckets, encodings."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dit_lora.commands.cache import is_recipe
from dit_lora.config.load import load_folder, load_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.data.audit.captions import check_captions, token_lengths
from dit_lora.data.audit.encoded import check_encoded
from dit_lora.data.audit.finding import VERDICTS, Finding, JudgedSample
from dit_lora.data.audit.labels import check_labels
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.pairs import pair_notes
from dit_lora.data.audit.runner import audit_media
from dit_lora.data.audit.sound import sound_note
from dit_lora.data.audit.summary import merge, totals
from dit_lora.data.cache.digests import Digests
from dit_lora.data.sources.scan import Scan, scan
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.families.base import Checkpoint, Encoders
from dit_lora.terminal import one_line
from dit_lora.training.session.session import quiet_libraries, running
from dit_lora.training.tasks.chat.audit import audit_conversations
from dit_lora.training.tasks.diffusion.cache_plan import AUDIT_MEMO
from dit_lora.training.tasks.diffusion.precompute import Precomputed, precompute
from dit_lora.training.tasks.diffusion.samples import Samples, find_samples

_SHOWN = 50  # rejects in the terminal

_REMEDIES = {
    "missing": "restore the file, or remove its line",
    "caption_missing": "write a caption (dit-lora caption), or remove the sample",
    "caption_empty": "write a caption, or remove the sample",
    "caption_long": "shorten it, or remove the sample",
    "caption_not_text": "write the caption anew as UTF-8",
    "unsafe_path": "move the file below the folder of the list, or name its folder in data.media",
    "unsafe_name": "pack the tar anew with plain names",
    "duplicate_clip": "keep one of them",
    "reference_missing": "restore the file, or remove the sample",
    "reference_ambiguous": "keep one file of a name",
    "mask_missing": "restore the file, or remove the sample",
    "mask_ambiguous": "keep one file of a name",
}

Findings = dict[str, list[Finding]]
"""Findings by the name of their sample."""


@dataclass(frozen=True)
class Audit:
    """Every sample judged, and the notes on the whole set."""

    title: str
    judged: list[JudgedSample]
    notes: tuple[str, ...] = ()
    buckets: dict[str, Any] | None = None
    encoded: dict[str, Any] | None = None

    @property
    def totals(self) -> dict[str, Any]:
        return totals(self.judged)

    @property
    def passed(self) -> bool:
        return not self.totals["reject"]

    def lines(self) -> list[str]:
        """Return rejects with their reasons, warnings by code, and totals, for a terminal."""
        lines = [
            one_line(f"reject  {one.file}: {'; '.join(_words(one))}")
            for one in self.judged
            if one.verdict == "reject"
        ]
        if len(lines) > _SHOWN:
            lines = [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more; --json lists all"]
        sums = self.totals
        warned = [one for one in self.judged if one.verdict == "warn"]
        codes = Counter(code for one in warned for code in {f.code for f in one.findings})
        lines += [f"warn    {code}: {count:,}" for code, count in codes.most_common()]
        lines += [one_line(f"note    {note}") for note in self.notes]
        lines += [one_line(f"advice  {one}") for one in (self.buckets or {}).get("advice", ())]
        counts = ", ".join(f"{sums[verdict]:,} {verdict}" for verdict in VERDICTS)
        return [*lines, f"{sums['samples']:,} samples: {counts}"]


def audit_target(target: str, overrides: Sequence[str], *, encode: bool) -> Audit:
    """Audit a recipe's file, with its overrides, or data by itself. Raises if an option needs a recipe."""
    if not is_recipe(target):
        if encode:
            raise DitLoraError(f"--encode needs a recipe (.yaml); got {target}")
        return audit_folder(target, overrides)
    quiet_libraries()
    recipe = load_recipe(target, overrides)
    family = get_family(recipe.model.family)
    if recipe.model.family in CHAT_FAMILIES:
        if encode:
            raise DitLoraError("--encode: a chat model's samples are not encoded before training")
        judged, words, notes = audit_conversations(
            recipe, family.open(recipe.model, recipe), progress=True
        )
        return Audit(recipe.data.path or "data.sources", merge(judged, words), tuple(notes))
    # As it is stored: what the recipe cannot train with is for the audit to list.
    audit = audit_recipe(recipe, family.open(recipe.model))
    return with_encodings(audit, recipe, family.open(recipe.model, recipe)) if encode else audit


def audit_folder(path: str, overrides: Sequence[str] = (), *, progress: bool = True) -> Audit:
    """Audit a folder, tar or dataset by itself: no shape is asked of it, and no text encoder limits its captions.

    `overrides` say where its captions, references and masks are, as `data.mask_folder=masks`.
    """
    data = load_folder(path, overrides)
    sources = scan(data)
    judged = audit_media(sources.clips, None, progress=progress)
    captions = check_captions(sources.clips, None, None)
    notes = (*sources.notes, *pair_notes(judged), *sound_note(judged))
    return Audit(path, merge(judged, _problems(sources), captions), notes)


def audit_recipe(recipe: Recipe, checkpoint: Encoders, *, progress: bool = True) -> Audit:
    """Audit the data of a recipe by its shapes and its model's tokenizer; files judged before are not decoded again."""
    data, root = recipe.data, recipe.cache_dir
    # The one thing of a recipe that a checkpoint as it is stored needs for the sizes of references.
    checkpoint = replace(checkpoint, reference_resolution=data.reference_resolution)
    sources = scan(data, root)
    samples = find_samples(recipe, checkpoint, group=recipe.train.batch_size, quiet=not progress)
    # The memo is the cache's: training reads it and refuses what was rejected here.
    digests, memo = Digests(root / "digests.json"), AuditMemo(root / AUDIT_MEMO)
    judged = audit_media(
        sources.clips,
        data,
        shapes=samples.shapes,
        reference_shape=checkpoint.references.shape if checkpoint.references else None,
        memo=memo,
        digests=digests,
        progress=progress,
    )
    digests.save()
    # A family without a text limit is conditioned on classes: captions are then labels.
    limit = checkpoint.text_limit()
    notes: list[str] = [*samples.notes, *pair_notes(judged)]
    tokens: dict[str, dict[str, int]] = {}
    if limit is None:
        words, about = check_labels(sources.clips, data.classes)
        notes += about
    else:
        # A caption given to a whole source is no duplicate in each of its clips.
        shared = {source.caption for source in data.all_sources if source.caption is not None}
        lengths = token_lengths(sources.clips, limit.tokenizer)
        words = check_captions(
            sources.clips, limit.tokenizer, limit.max_tokens, lengths=lengths, shared=shared
        )
        tokens = {clip.id: {"caption_tokens": lengths[clip.caption]} for clip in sources.clips}
    report = samples.report
    merged = merge(judged, _problems(sources), words, _dropped(samples, judged), facts=tokens)
    return Audit(
        title=data.path or "data.sources",
        judged=merge(merged, _by_clip(_unfit(samples, merged), merged)),
        notes=tuple(notes),
        buckets=report.as_dict() if report else None,
    )


def with_encodings(audit: Audit, recipe: Recipe, checkpoint: Checkpoint) -> Audit:
    """Encode samples that are not cached yet, and look at the latents and embeddings of all."""
    # An audit reports every bad sample; a recipe that refuses them would end it at the first.
    data = recipe.data.model_copy(update={"rejects": "skip", "precompute": True})
    recipe = recipe.model_copy(update={"data": data})
    with running(recipe) as session:
        encoded = precompute(session, checkpoint)
    damaged: Findings = {}
    non_finite, statistics = check_encoded(_tensors(encoded, damaged))
    failed = {
        name: [_failed(why)] for name, why in encoded.rejected.items() if "is not usable" in why
    }
    parts = [_by_clip(part, audit.judged) for part in (damaged, non_finite, failed)]
    return replace(audit, judged=merge(audit.judged, *parts), encoded=statistics)


def _by_clip(by_file: Findings, judged: Sequence[JudgedSample]) -> Findings:
    """Return findings by clip: those of a clip's later windows move to the clip's name."""
    files = {one.file for one in judged}
    by_clip: Findings = {}
    for name, findings in by_file.items():
        clip, _, start = name.rpartition("@")
        if name in files or clip not in files:
            by_clip.setdefault(name, []).extend(findings)
            continue
        moved = [replace(one, words=f"from {start} on: {one.words}") for one in findings]
        by_clip.setdefault(clip, []).extend(moved)
    return by_clip


def _words(one: JudgedSample) -> list[str]:
    return [f"{f.code}: {f.words}" for f in one.findings if f.verdict == "reject"]


def _problems(scanned: Scan) -> Findings:
    problems: Findings = {}
    for one in scanned.problems:
        remedy = _REMEDIES.get(one.code, "correct it, or remove the sample")
        problems.setdefault(one.file, []).append(Finding(one.code, one.words, "reject", remedy))
    return problems


def _dropped(samples: Samples, judged: Sequence[JudgedSample]) -> Findings:
    """Return findings on samples that fit no bucket, where the media's own findings do not say it."""
    codes = {one.file: {finding.code for finding in one.findings} for one in judged}
    dropped = samples.report.dropped if samples.report else ()
    return {
        name: [Finding(one.code, one.words, "reject", "change data.buckets, or remove it")]
        for name, one in dropped
        if one.code not in codes.get(name, ())
    }


def _unfit(samples: Samples, judged: Sequence[JudgedSample]) -> Findings:
    """Return findings on samples whose references the model does not take, as their number; all else is said."""
    rejected = {one.file for one in judged if one.verdict == "reject"}
    remedy = "give it such references, or remove it"
    return {
        name: [Finding("reference_unfit", words, "reject", remedy)]
        for name, words in samples.rejected.items()
        if name not in rejected and name.rpartition("@")[0] not in rejected
    }


def _tensors(
    encoded: Precomputed, damaged: Findings
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield each sample's tensors from its cache entries; those that are torn or altered are noted in `damaged`."""
    clips = encoded.clips
    for entry in clips.entries:
        sample = clips.read(entry, entry.text_key, 0)
        if sample.faults:
            words = sample.faults[entry.id]
            remedy = "dit-lora cache verify RECIPE --set-aside, and build it anew"
            damaged[entry.id] = [Finding("cache_damaged", words, "reject", remedy)]
        yield entry.id, {name: tensor[0] for name, tensor in sample.tensors.items()}


def _failed(why: str) -> Finding:
    """Return the finding that an encoder's message stands for."""
    part = "embedding" if "caption '" in why else "latent"
    kind = "out_of_range" if "beyond" in why else "non_finite"
    remedy = "look at the sample; encode it in fp32 or bf16, or remove it"
    return Finding(f"{part}_{kind}", why, "reject", remedy)
