"""Audits all data of a recipe: as a folder is audited, and with the recipe's shapes and its model's tokenizer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from dit_lora.commands.audit import Audit, Findings, collect_scan_findings
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.data.audit.captions import check_captions, count_caption_tokens
from dit_lora.data.audit.encoded import check_encoded
from dit_lora.data.audit.finding import AuditedSample, Finding
from dit_lora.data.audit.labels import check_labels
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.pairs import summarise_pairs
from dit_lora.data.audit.runner import audit_media
from dit_lora.data.audit.summary import merge_audits
from dit_lora.data.cache.digests import Digests
from dit_lora.data.sources.held_out import scan_recipe
from dit_lora.environment.progress_bar import hide_progress_bars
from dit_lora.errors import DitLoraError
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.families.base import Checkpoint, Encoders
from dit_lora.training.session.session import start_run_session
from dit_lora.training.tasks.chat.audit import audit_conversations
from dit_lora.training.tasks.diffusion.cache_plan import AUDIT_FILE
from dit_lora.training.tasks.diffusion.precompute import DiffusionTrainingData, precompute
from dit_lora.training.tasks.diffusion.samples import RecipeSamples, find_samples


def audit_recipe_file(path: str, overrides: Sequence[str], *, encode: bool) -> Audit:
    """Audit the data of a recipe's file, with `overrides`, and its encoded samples with `encode`.

    Raises `DitLoraError` if the recipe or the data cannot be read.
    """
    hide_progress_bars()
    recipe = load_recipe(path, overrides)
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
        reference_shape=info.reference_spec.encoded_shape if info.reference_spec else None,
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
    merged = merge_audits(audited_samples, collect_scan_findings(sources), caption_findings, unbucketed, facts=tokens)
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
    with start_run_session(recipe) as session:
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
        moved = [replace(finding, message=f"from {start} on: {finding.message}") for finding in findings]
        by_clip.setdefault(clip, []).extend(moved)
    return by_clip


def _find_unsupported_references(samples: RecipeSamples, audited_samples: Sequence[AuditedSample]) -> Findings:
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
    for clips in (encoded.training_set, encoded.validation_set):
        if clips is None:
            continue
        for entry in clips.entries:
            # Reads the entry and checks its digest; damage is reported in `faults`.
            sample = clips.read(entry, entry.text_key, 0)
            if sample.faults:
                reason = sample.faults[entry.id]
                remedy = "run dit-lora cache verify RECIPE --set-aside, then dit-lora cache build RECIPE"
                damaged[entry.id] = [Finding("cache_damaged", reason, "reject", remedy)]
            # Without the batch dimension, which is 1.
            yield entry.id, {name: tensor[0] for name, tensor in sample.tensors.items()}
