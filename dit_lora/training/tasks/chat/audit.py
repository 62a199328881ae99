"""Audits conversations: decodes and checks their files, and renders their text as training does."""

from dataclasses import replace

from dit_lora.config.recipe import Recipe
from dit_lora.data.audit.finding import AuditedSample, Finding
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.runner import audit_media
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media.media import Media
from dit_lora.data.sources.clips import Clip
from dit_lora.families.chat_base import ChatCheckpoint
from dit_lora.training.tasks.chat.samples import ChatSamples, find_conversations
from dit_lora.training.tasks.diffusion.cache_plan import AUDIT_FILE

Findings = dict[str, list[Finding]]
"""Findings by sample name."""


def audit_conversations(
    recipe: Recipe, checkpoint: ChatCheckpoint, *, progress: bool
) -> tuple[list[AuditedSample], Findings, list[str]]:
    """Audit all samples of a chat dataset.

    Returns each with its file's findings, findings about texts, and notes on the whole set.
    """
    root = recipe.cache_dir
    samples = find_conversations(recipe, checkpoint, recipe.data, quiet=not progress)
    by_media: dict[Media, str] = {}
    for name, media in samples.media.items():
        # Several samples may ask about one file.
        by_media.setdefault(media, name)
    clips = [Clip(name, media, "") for media, name in by_media.items()]
    digests = Digests(root / "digests.json")
    memo = AuditMemo(root / AUDIT_FILE)
    files_audited = audit_media(clips, None, memo=memo, digests=digests, show_progress=progress)
    digests.save()
    # A file's findings hold for every sample that uses it.
    of_file = {result.file: result for result in files_audited}
    samples_audited = [
        replace(of_file[by_media[samples.media[name]]], file=name) if name in samples.media else AuditedSample(name)
        for name in samples.names
    ]
    return samples_audited, _find_text_problems(samples, samples_audited), _summarize_lengths(samples)


def _find_text_problems(samples: ChatSamples, audited_samples: list[AuditedSample]) -> Findings:
    """Findings about the texts of chat samples. Samples that are rejected for their file are not reported again."""
    at_fault = {sample.file for sample in audited_samples if sample.verdict == "reject"}
    findings: Findings = {
        name: [Finding("conversation", message, "reject", "correct it, or remove the sample")]
        for name, message in samples.rejected.items()
        if name not in at_fault
    }
    # Shortened questions still train: they only give a warning.
    shortened = {entry.id: entry.num_dropped_tokens for entry in samples.entries if entry.num_dropped_tokens}
    for name, dropped in shortened.items():
        message = f"{dropped} tokens of its questions are left out, to stay within chat.max_tokens"
        remedy = "raise chat.max_tokens, or shorten the question"
        findings.setdefault(name, []).append(Finding("question_long", message, "warn", remedy))
    return findings


def _summarize_lengths(samples: ChatSamples) -> list[str]:
    if not samples.entries:
        return []
    # Lengths with padding, as in training.
    lengths = sorted(entry.shape.length for entry in samples.entries)
    answers = sum(entry.answers for entry in samples.entries)
    return [
        f"{len(lengths):,} conversations of up to {lengths[-1]} tokens (half of them up to "
        f"{lengths[len(lengths) // 2]}); {answers:,} answer tokens"
    ]
