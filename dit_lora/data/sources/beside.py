"""References and masks in folders of their own, whose files have the names of the samples; and masks in transparency."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dit_lora.config.data import SourceConfig
from dit_lora.data.media.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, MediaFile, is_image
from dit_lora.data.sources.clips import Clip, ClipProblem, LossMask, Scan
from dit_lora.errors import DitLoraError


def with_beside(scanned: Scan, source: SourceConfig) -> Scan:
    """Return the clips of a folder with their files in `reference_folders` and `mask_folder`, and with `alpha_mask`.

    A clip that has no file there is a problem. Raises `DitLoraError` if a folder is missing, or holds samples itself.
    """
    root = Path(source.path).expanduser()
    references = [_files(root, folder, "reference_folders") for folder in source.reference_folders]
    masks = _files(root, source.mask_folder, "mask_folder") if source.mask_folder else None
    clips, problems = [], list(scanned.problems)
    for clip in scanned.clips:
        stem = os.path.splitext(clip.id)[0]
        found = [(folder, files.get(stem)) for folder, files in references]
        lacks = [folder for folder, file in found if file is None]
        words = [("reference_missing", f"no reference of its name in {folder}") for folder in lacks]
        mask = masks[1].get(stem) if masks else None
        if masks and mask is None:
            words.append(("missing", f"no mask of its name in {masks[0]}"))
        problems += [ClipProblem(clip.id, *one) for one in words]
        if not words:
            clips.append(_given(clip, [file for _, file in found if file], mask, source.alpha_mask))
    return Scan(clips, problems)


def refuse_folders(source: SourceConfig) -> None:
    """Raise `DitLoraError` for folders beside a source that is no folder of files."""
    if source.reference_folders or source.mask_folder:
        raise DitLoraError(
            f"reference_folders and mask_folder are for folders of files; {source.path} holds its media itself: name "
            "its columns in reference_columns and mask_column"
        )


def _given(
    clip: Clip, references: Sequence[MediaFile], mask: MediaFile | None, alpha: bool
) -> Clip:
    if references:
        clip = replace(clip, references=tuple(references))
    if alpha and is_image(clip.media):
        return replace(clip, mask=LossMask(clip.media, alpha=True))
    return replace(clip, mask=LossMask(mask)) if mask else clip


def _files(root: Path, folder: str, option: str) -> tuple[str, dict[str, MediaFile]]:
    """Return the folder's name, and its pictures and videos by their paths without suffix."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise DitLoraError(f"{option}: no folder {folder}")
    if path.resolve().is_relative_to(root.resolve()):
        raise DitLoraError(
            f"{option}: {folder} lies in {root}, where every picture and video is a sample; move it beside that folder"
        )
    found = {}
    for file in sorted(path.rglob("*")):
        if file.suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES:
            found[file.relative_to(path).with_suffix("").as_posix()] = MediaFile(file)
    return folder, found
