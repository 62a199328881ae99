"""Duplicate clips: equal byte for byte, or equal to the eye.

Shapes: N clips, M moments of each.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dit_lora.data.audit.finding import Finding
from dit_lora.data.audit.signature import MediaSignature

# Pairs of limits: bits of 64 in which the hashes differ on average, and levels by which any colour differs once the
# means are equal. Seven real clips encoded at crf 35, at half the size or frame rate, or a sixth brighter: up to
# 4 bits and 27 levels; smooth waves at crf 30 to 40: up to 9 and 20. A disc and a square: 8 and 18 or more; other
# clips: 27 and 75 or more.
_DUPLICATE_LIMITS = ((6, 28), (10, 14))
# Number of clips that are compared with all others at a time; it bounds the memory.
_CHUNK_ROWS = 1024


def find_exact_duplicates(digests: Mapping[str, tuple[str, ...]]) -> dict[str, Finding]:
    """Findings about clips with the same bytes as an earlier clip, by id.

    `digests` are those of a clip and of its references, in order: the same target with other references is a
    different sample.
    """
    originals: dict[tuple[str, ...], str] = {}
    findings = {}
    for file, digest in digests.items():
        # The first file with this content stays; only later ones get a finding.
        before = originals.setdefault(digest, file)
        if before != file:
            message = f"the same bytes as {before}"
            remedy = "remove it; to use it more often, set repeats or weight in data.sources"
            findings[file] = Finding("duplicate_clip", message, "warn", remedy)
    return findings


def find_near_duplicates(signatures: Mapping[str, MediaSignature]) -> dict[str, Finding]:
    """Findings about clips that look like an earlier clip, by id, in the order of `signatures`."""
    groups: dict[int, list[str]] = {}
    # Clips have five moments and images have one; only signatures of equal length can be compared.
    for file, signature in signatures.items():
        groups.setdefault(len(signature.hashes), []).append(file)
    findings = {}
    for files in groups.values():
        for file, before in _match_earlier_files(files, [signatures[file] for file in files]).items():
            remedy = "remove the worse of the two"
            findings[file] = Finding("near_duplicate_clip", f"it looks like {before}", "warn", remedy)
    return findings


def _match_earlier_files(files: Sequence[str], signatures: Sequence[MediaSignature]) -> dict[str, str]:
    """For each file that looks like an earlier one, the first such file."""
    # (N, M), one hash for each moment.
    hashes = np.stack([signature.hashes for signature in signatures])
    moments = hashes.shape[1]
    # (N, M, 4, 4, 3): mean colours of 4 x 4 areas.
    colours = np.stack([signature.colours for signature in signatures]).astype(np.float32)
    # Subtract each clip's mean colour, so that a brighter or darker copy still matches.
    colours -= colours.mean((2, 3, 4), keepdims=True)
    originals: dict[str, str] = {}
    for start in range(0, len(files), _CHUNK_ROWS):
        rows = hashes[start : start + _CHUNK_ROWS]
        # One moment at a time, so that memory stays at rows x N instead of rows x N x M.
        differing = np.zeros((len(rows), min(start + _CHUNK_ROWS, len(files))), np.int32)
        for moment in range(moments):
            differing += np.bitwise_count(rows[:, None, moment] ^ hashes[None, : differing.shape[1], moment])
        # The hashes rule out most pairs cheaply; colours are compared only for the rest.
        max_bits = max(bits for bits, _ in _DUPLICATE_LIMITS)
        for row, is_candidate in enumerate(differing <= max_bits * moments):
            later = start + row
            for earlier in np.flatnonzero(is_candidate[:later]).tolist():
                bits = differing[row, earlier] / moments
                levels = np.abs(colours[later] - colours[earlier]).max()
                if any(bits <= bit_limit and levels <= level_limit for bit_limit, level_limit in _DUPLICATE_LIMITS):
                    originals[files[later]] = files[earlier]
                    break
    return originals
