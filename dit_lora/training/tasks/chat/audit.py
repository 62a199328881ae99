"""Audits conversations: their files decoded and judged, their text rendered as training renders it."""

from collections.abc import Mapping
from dataclasses import replace

from dit_lora.config.recipe import Recipe
from dit_lora.data.audit.finding import Finding, JudgedSample
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.runner import audit_media
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media.media import Media
from dit_lora.data.sources.clips import Clip
from dit_lora.families.chat_base import ChatCheckpoint
from dit_lora.training.tasks.chat.samples import ChatSamples, find_conversations
from dit_lora.training.tasks.diffusion.cache_plan import AUDIT_MEMO

Findings = dict[str, list[Finding]]
"""Findings by the name of their sample."""


def audit_conversations(
    recipe: Recipe, checkpoint: ChatCheckpoint, *, progress: bool
) -> tuple[list[JudgedSample], Findings, list[str]]:
    """Return every sample with its file's findings, the findings of its text, and notes on the whole set."""
    root = recipe.cache_dir
    samples = find_conversations(recipe, checkpoint, recipe.data, quiet=not progress)
    by_media: dict[Media, str] = {}
    for name, media in samples.media.items():
        by_media.setdefault(media, name)  # several samples may ask about one file
    clips = [Clip(name, media, "") for media, name in by_media.items()]
    digests = Digests(root / "digests.json")
    memo = AuditMemo(root / AUDIT_MEMO)
    judged = audit_media(clips, None, memo=memo, digests=digests, progress=progress)
    digests.save()
    of_file = {one.file: one for one in judged}
    every = [
        replace(of_file[by_media[samples.media[name]]], file=name)
        if name in samples.media
        else JudgedSample(name)
        for name in samples.names
    ]
    return every, _of_text(samples, every), _notes(samples)


def _of_text(samples: ChatSamples, judged: list[JudgedSample]) -> Findings:
    """Return findings on texts; a sample whose file is at fault already has that said of the file alone."""
    at_fault = {one.file for one in judged if one.verdict == "reject"}
    findings: Findings = {
        name: [Finding("conversation", words, "reject", "correct it, or remove the sample")]
        for name, words in samples.rejected.items()
        if name not in at_fault
    }
    for name, dropped in _shortened(samples).items():
        words = f"{dropped} tokens of its questions are left out, to stay within chat.max_tokens"
        remedy = "raise chat.max_tokens, or shorten the question"
        findings.setdefault(name, []).append(Finding("question_long", words, "warn", remedy))
    return findings


def _shortened(samples: ChatSamples) -> Mapping[str, int]:
    return {entry.id: entry.shortened for entry in samples.entries if entry.shortened}


def _notes(samples: ChatSamples) -> list[str]:
    if not samples.entries:
        return []
    lengths = sorted(entry.shape.length for entry in samples.entries)
    answers = sum(entry.answers for entry in samples.entries)
    return [
        f"{len(lengths):,} conversations of up to {lengths[-1]} tokens (half of them up to "
        f"{lengths[len(lengths) // 2]}); {answers:,} answer tokens"
    ]
