"""Audits a folder, or all data of a recipe: sources, media, captions or labels, buckets, encodings."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dit_lora.commands.cache import is_recipe
from dit_lora.config.load import load_folder_config, load_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.data.audit.captions import check_captions, count_caption_tokens
from dit_lora.data.audit.encoded import check_encoded
from dit_lora.data.audit.finding import VERDICTS, AuditedSample, Finding
from dit_lora.data.audit.labels import check_labels
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.pairs import summarise_pairs
from dit_lora.data.audit.runner import audit_media
from dit_lora.data.audit.sound import summarise_sound
from dit_lora.data.audit.summary import compute_totals, merge_audits
from dit_lora.data.cache.digests import Digests
from dit_lora.data.sources.clips import Scan
from dit_lora.data.sources.held_out import scan_recipe
from dit_lora.data.sources.scan import scan_sources
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.families.base import Checkpoint, Encoders
from dit_lora.terminal import make_one_line
from dit_lora.training.session.session import hide_progress_bars, running
from dit_lora.training.tasks.chat.audit import audit_conversations
from dit_lora.training.tasks.diffusion.cache_plan import AUDIT_FILE
from dit_lora.training.tasks.diffusion.precompute import DiffusionTrainingData, precompute
from dit_lora.training.tasks.diffusion.samples import Samples, find_samples

_MAX_SHOWN_REJECTS = 50  # rejects in the terminal

_REMEDIES = {
    "missing": "restore the file, or remove its line",
    "caption_missing": "write a caption (dit-lora caption), or remove the sample",
    "caption_empty": "write a caption, or remove the sample",
    "caption_long": "shorten it, or remove the sample",
    "caption_not_text": "save the caption as UTF-8",
    "unsafe_path": "move the file into the folder of the list, or set data.media to its folder",
    "unsafe_name": "pack the tar again with plain names",
    "duplicate_clip": "keep one of them",
    "reference_missing": "restore the file, or remove the sample",
    "reference_ambiguous": "keep one file of each name",
    "mask_missing": "restore the file, or remove the sample",
    "mask_ambiguous": "keep one file of each name",
}

Findings = dict[str, list[Finding]]
"""Findings by the name of their sample."""


@dataclass(frozen=True)
class Audit:
    """Result of an audit: the findings on every sample, and notes on the dataset as a whole."""

    title: str
    audited_samples: list[AuditedSample]
    notes: tuple[str, ...] = ()
    buckets: dict[str, Any] | None = None
    encoded: dict[str, Any] | None = None

    @property
    def totals(self) -> dict[str, Any]:
        """Number of audited samples, by verdict and in total."""
        return compute_totals(self.audited_samples)

    @property
    def passed(self) -> bool:
        """True if the audit rejected no sample."""
        return not self.totals["reject"]

    def lines(self) -> list[str]:
        """The audit as text for a terminal.

        It has rejected samples with reasons, warnings by code, notes, advice and totals.
        """
        # Every rejected sample has a line, up to a limit.
        lines = []
        for sample in self.audited_samples:
            if sample.verdict == "reject":
                reasons = [f"{f.code}: {f.words}" for f in sample.findings if f.verdict == "reject"]
                lines.append(make_one_line(f"reject  {sample.file}: {'; '.join(reasons)}"))
        if len(lines) > _MAX_SHOWN_REJECTS:
            lines = [*lines[:_MAX_SHOWN_REJECTS], f"and {len(lines) - _MAX_SHOWN_REJECTS} more; --json lists all"]
        sums = self.totals
        # Warnings are counted by code: a list of all of them would hide the rejects.
        warned = [sample for sample in self.audited_samples if sample.verdict == "warn"]
        codes = Counter(code for sample in warned for code in {f.code for f in sample.findings})
        lines += [f"warn    {code}: {count:,}" for code, count in codes.most_common()]
        lines += [make_one_line(f"note    {note}") for note in self.notes]
        lines += [make_one_line(f"advice  {advice}") for advice in (self.buckets or {}).get("advice", ())]
        counts = ", ".join(f"{sums[verdict]:,} {verdict}" for verdict in VERDICTS)
        return [*lines, f"{sums['samples']:,} samples: {counts}"]


def audit_target(target: str, overrides: Sequence[str], *, encode: bool) -> Audit:
    """Audit a recipe's data, with `overrides`, or a folder, tar or dataset.

    Raises:
        DitLoraError: An option needs a recipe, or the recipe or the data cannot be read.
    """
    if not is_recipe(target):
        if encode:
            raise DitLoraError(f"--encode needs a recipe (.yaml); got {target}")
        return audit_folder(target, overrides)
    hide_progress_bars()
    recipe = load_recipe(target, overrides)
    family = get_family(recipe.model.family)
    if recipe.model.family in CHAT_FAMILIES:
        if encode:
            raise DitLoraError(
                "--encode does not apply to chat models, whose samples are not encoded before training; remove it"
            )
        checkpoint = family.open(recipe.model, recipe)
        audited_samples, caption_findings, notes = audit_conversations(recipe, checkpoint, progress=True)
        return Audit(recipe.data.path or "data.sources", merge_audits(audited_samples, caption_findings), tuple(notes))
    # Open the checkpoint without the recipe: the audit itself lists what the recipe cannot train with.
    audit = audit_recipe(recipe, family.open(recipe.model).encoders)
    return add_encoding_findings(audit, recipe, family.open(recipe.model, recipe)) if encode else audit


def audit_folder(path: str, overrides: Sequence[str] = (), *, progress: bool = True) -> Audit:
    """Audit a folder, tar or dataset without a recipe: no shape is required, and caption length is not limited.

    `overrides` set where its captions, references and masks are, such as `data.mask_folder=masks`.
    """
    data = load_folder_config(path, overrides)
    # Lists the files with their captions; nothing is decoded yet.
    sources = scan_sources(data)
    # None: without a recipe there are no shapes to check against.
    audited_samples = audit_media(sources.clips, None, show_progress=progress)
    captions = check_captions(sources.clips, None, None)
    notes = (*sources.notes, *summarise_pairs(audited_samples), *summarise_sound(audited_samples))
    return Audit(path, merge_audits(audited_samples, _collect_scan_findings(sources), captions), notes)


def audit_recipe(recipe: Recipe, encoders: Encoders, *, progress: bool = True) -> Audit:
    """Audit the data of a recipe with its shapes and its model's tokenizer.

    Files audited before are not decoded again.
    """
    data, root = recipe.data, recipe.cache_dir
    # The only recipe setting that a checkpoint needs to compute the sizes of references.
    info = replace(encoders.info, reference_resolution=data.reference_resolution)
    # With the clips of `validation.data`, which the notes name.
    sources = scan_recipe(recipe)
    # The samples as training would form them: windows, buckets and references.
    samples = find_samples(recipe, info, samples_per_step=recipe.train.batch_size, quiet=not progress)
    # The memo is in the cache folder: training reads it and refuses samples that were rejected here.
    digests, memo = Digests(root / "digests.json"), AuditMemo(root / AUDIT_FILE)
    audited_samples = audit_media(
        sources.clips,
        data,
        shapes=samples.shapes,
        reference_shape=info.references.encoded_shape if info.references else None,
        memo=memo,
        digests=digests,
        show_progress=progress,
    )
    # Digests of the files' contents, so that unchanged files are not read again.
    digests.save()
    # A family without a text limit is conditioned on classes: its captions are labels.
    limit = encoders.load_text_limit()
    notes: list[str] = [*samples.notes, *summarise_pairs(audited_samples)]
    tokens: dict[str, dict[str, int]] = {}
    if limit is None:
        caption_findings, label_notes = check_labels(sources.clips, data.classes)
        notes += label_notes
    else:
        # A caption that the recipe sets for a whole source does not count as a duplicate in its clips.
        shared = {source.caption for source in data.all_sources if source.caption is not None}
        lengths = count_caption_tokens(sources.clips, limit.tokenizer)
        caption_findings = check_captions(
            sources.clips, limit.tokenizer, limit.max_tokens, lengths=lengths, shared_captions=shared
        )
        tokens = {clip.id: {"caption_tokens": lengths[clip.caption]} for clip in sources.clips}
    report = samples.report
    # Codes that the check of the media has reported already, by file.
    codes = {sample.file: {finding.code for finding in sample.findings} for sample in audited_samples}
    unbucketed = {
        name: [Finding(item.code, item.words, "reject", "change data.buckets, or remove it")]
        for name, item in (report.dropped if report else ())
        if item.code not in codes.get(name, ())
    }
    merged = merge_audits(audited_samples, _collect_scan_findings(sources), caption_findings, unbucketed, facts=tokens)
    return Audit(
        title=data.path or "data.sources",
        audited_samples=merge_audits(merged, _group_by_clip(_find_unsupported_references(samples, merged), merged)),
        notes=tuple(notes),
        buckets=report.as_dict() if report else None,
    )


def add_encoding_findings(audit: Audit, recipe: Recipe, checkpoint: Checkpoint) -> Audit:
    """Encode the samples that are not cached yet, and check the latents and embeddings of all."""
    # An audit reports every bad sample; `rejects: refuse` would stop it at the first.
    data = recipe.data.model_copy(update={"rejects": "skip", "precompute": True})
    recipe = recipe.model_copy(update={"data": data})
    # Encode as training does, into the same cache.
    with running(recipe) as session:
        encoded = precompute(session, checkpoint)
    damaged: Findings = {}
    non_finite, statistics = check_encoded(_iterate_tensors(encoded, damaged))
    failed: Findings = {}
    for name, reason in encoded.rejected.items():
        if "is not usable" in reason:
            part = "embedding" if "caption '" in reason else "latent"
            kind = "out_of_range" if "beyond" in reason else "non_finite"
            remedy = "look at the sample; encode it in fp32 or bf16, or remove it"
            failed[name] = [Finding(f"{part}_{kind}", reason, "reject", remedy)]
    # Each part has findings by cache entry, and an entry may be one window of a clip.
    grouped = [_group_by_clip(findings, audit.audited_samples) for findings in (damaged, non_finite, failed)]
    return replace(audit, audited_samples=merge_audits(audit.audited_samples, *grouped), encoded=statistics)


def _group_by_clip(findings_by_file: Findings, audited_samples: Sequence[AuditedSample]) -> Findings:
    """Findings by clip: those on a clip's later windows (named `clip@start`) move to the clip's name."""
    # Names of samples that the audit has listed.
    files = {sample.file for sample in audited_samples}
    by_clip: Findings = {}
    for name, findings in findings_by_file.items():
        # A name without `@` gives an empty clip, which is no listed file.
        clip, _, start = name.rpartition("@")
        if name in files or clip not in files:
            by_clip.setdefault(name, []).extend(findings)
            continue
        moved = [replace(finding, words=f"from {start} on: {finding.words}") for finding in findings]
        by_clip.setdefault(clip, []).extend(moved)
    return by_clip


def _collect_scan_findings(scan_result: Scan) -> Findings:
    problems: Findings = {}
    for problem in scan_result.problems:
        remedy = _REMEDIES.get(problem.code, "correct it, or remove the sample")
        problems.setdefault(problem.file, []).append(Finding(problem.code, problem.message, "reject", remedy))
    return problems


def _find_unsupported_references(samples: Samples, audited_samples: Sequence[AuditedSample]) -> Findings:
    """Audit findings on samples with references that the model does not accept (such as too many).

    Samples that are already rejected are left out.
    """
    # One reason is enough for the user to act on.
    rejected = {sample.file for sample in audited_samples if sample.verdict == "reject"}
    remedy = "give it references of that kind, or remove it"
    return {
        name: [Finding("reference_unfit", reason, "reject", remedy)]
        for name, reason in samples.rejected.items()
        if name not in rejected and name.rpartition("@")[0] not in rejected
    }


def _iterate_tensors(
    encoded: DiffusionTrainingData, damaged: Findings
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield each sample's name and tensors from its cache entries. Corrupt entries are added to `damaged`."""
    for clips in filter(None, (encoded.training_set, encoded.validation_set)):
        for entry in clips.entries:
            # Reads the entry and checks its digest; damage is reported in `faults`.
            sample = clips.read(entry, entry.text_key, 0)
            if sample.faults:
                reason = sample.faults[entry.id]
                remedy = "run dit-lora cache verify RECIPE --set-aside, then dit-lora cache build RECIPE"
                damaged[entry.id] = [Finding("cache_damaged", reason, "reject", remedy)]
            # Without the batch dimension, which is 1.
            yield entry.id, {name: tensor[0] for name, tensor in sample.tensors.items()}
