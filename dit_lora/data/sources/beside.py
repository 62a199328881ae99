"""References and masks in separate folders, with files named like the samples; and masks in the alpha channel."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dit_lora.config.data import SourceConfig
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import MediaFile
from dit_lora.data.sources.caption_text import Fault
from dit_lora.data.sources.clips import MASK, REFERENCE, Clip, ClipProblem, DataScan, LossMask, merge_faults_by_code
from dit_lora.data.sources.listing import FolderListing
from dit_lora.errors import DitLoraError


def add_references_and_masks(scanned: DataScan, source: SourceConfig, *, is_unlisted: bool) -> DataScan:
    """Add references and masks to the clips of a folder, from `reference_folders` and `mask_folder` or `alpha_mask`.

    A clip without a file there is a problem. Raises `DitLoraError` if a folder is missing or has no file for any clip.
    With `is_unlisted`, every file below the source's folder is a sample; such a folder inside it is an error too.
    """
    # A folder inside the root would be read as samples itself.
    root = Path(source.path).expanduser() if is_unlisted else None
    option = "reference_folders"
    references = [_ExtraFolder.from_path(name, option, REFERENCE, root) for name in source.reference_folders]
    masks = [_ExtraFolder.from_path(source.mask_folder, "mask_folder", MASK, root)] if source.mask_folder else []
    for folder in (*references, *masks):
        folder.check_has_files(scanned.clips, source.path)
    clips, problems = [], list(scanned.problems)
    for clip in scanned.clips:
        faults = [folder.find_fault(clip) for folder in (*references, *masks)]
        # A sample has at most one problem per code, so faults of several folders are joined.
        merged = merge_faults_by_code([fault for fault in faults if fault is not None])
        problems += [ClipProblem(clip.id, code, message) for code, message in merged]
        if not merged:
            # A table may name the references and a folder hold the masks, or the reverse: keep what the clip has.
            files = tuple(folder.get_file(clip) for folder in references) or clip.references
            mask = LossMask(masks[0].get_file(clip)) if masks else clip.mask
            clips.append(replace(clip, references=files, mask=mask))
    return add_alpha_masks(DataScan(clips, problems, scanned.notes), source)


def add_alpha_masks(scanned: DataScan, source: SourceConfig) -> DataScan:
    """Use the alpha channel of each picture as its loss mask, if the source has `alpha_mask`."""
    if not source.alpha_mask:
        return scanned
    masked_clips = [
        replace(clip, mask=LossMask(clip.media, alpha=True)) if is_image(clip.media) else clip
        for clip in scanned.clips
    ]
    return scanned._replace(clips=masked_clips)


def reject_extra_folders(source: SourceConfig) -> None:
    """Raise `DitLoraError` if a source other than a folder of files has folders of references or masks."""
    if source.reference_folders or source.mask_folder:
        raise DitLoraError(
            f"reference_folders and mask_folder are for folders of files; {source.path} holds its media itself: name "
            "its columns in reference_columns and mask_column"
        )


@dataclass(frozen=True)
class _ExtraFolder:
    """A folder of references or masks, whose files have the names of samples."""

    name: str
    option: str
    role: str
    files: dict[str, list[str]]
    """Paths of the pictures and videos below it, by the path without suffix."""

    @classmethod
    def from_path(cls, name: str, option: str, role: str, root: Path | None) -> "_ExtraFolder":
        """List a folder of references or masks; raises `DitLoraError` if it is missing, or inside `root`."""
        path = Path(name).expanduser()
        if not path.is_dir():
            raise DitLoraError(f"{option}: the folder {name} does not exist")
        if root is not None and path.resolve().is_relative_to(root.resolve()):
            raise DitLoraError(
                f"{option}: {name} lies in {root}, where every picture and video is a sample; move it out of that "
                "folder"
            )
        files: dict[str, list[str]] = {}
        for file in FolderListing(path).media:
            # Several files of one name with different suffixes are an ambiguity, which is reported per clip.
            files.setdefault(os.path.splitext(file)[0], []).append(file)
        return cls(name, option, role, files)

    def check_has_files(self, clips: Sequence[Clip], source: str) -> None:
        """Raise `DitLoraError` if no clip has a file in this folder: then the folder or its file names are wrong."""
        if not clips or any(_get_stem(clip) in self.files for clip in clips):
            return
        example = next((file for files in self.files.values() for file in files), None)
        contents = f"it has {example}" if example else "it has no picture and no video"
        raise DitLoraError(
            f"{self.option}: no file in {self.name} has the name of a sample in {source}, "
            f"such as {_get_stem(clips[0])} with any suffix; {contents}"
        )

    def find_fault(self, clip: Clip) -> Fault | None:
        files = self.files.get(_get_stem(clip), [])
        # A broken link is listed, but does not exist.
        if not files or not self.get_file(clip).exists():
            return f"{self.role}_missing", f"it has no {self.role} with its name in {self.name}"
        if len(files) > 1:
            names = ", ".join(files)
            return f"{self.role}_ambiguous", f"several files in {self.name} have its name: {names}"
        return None

    def get_file(self, clip: Clip) -> MediaFile:
        return MediaFile(Path(self.name).expanduser() / self.files[_get_stem(clip)][0])


def _get_stem(clip: Clip) -> str:
    return os.path.splitext(clip.id)[0]
