"""The training data and the adapter of runs that faults are injected into."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.faults.targets import FaultTargets
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.opened import open_picture
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.data.synthetic.conversations import write_conversations

CLIPS = 6


def write_clips(folder: Path, *, sound: bool = False) -> None:
    write_shapes(folder, clips=CLIPS, frames=9, height=32, width=48, fps=8, sound=sound)


def write_images(folder: Path) -> None:
    write_shapes(folder, clips=CLIPS, frames=1, height=64, width=64, fps=8)


def write_pairs(folder: Path) -> None:
    """Images, each with itself turned as its reference, and with a mask of its left half."""
    write_images(folder)
    lines = []
    for file in sorted(folder.glob("*.png")):
        caption = file.with_suffix(".txt")
        with open_picture(MediaFile(file)) as opened_image:
            picture = opened_image.convert("RGB")
        mask = Image.new("L", picture.size)
        mask.paste(255, (0, 0, picture.width // 2, picture.height))
        row = {"file_name": file.name, "text": caption.read_text("utf-8").strip()}
        pictures = {
            "references": picture.transpose(Image.Transpose.TRANSPOSE),
            "masks": mask,
        }
        for name, image in pictures.items():
            (folder / name).mkdir(exist_ok=True)
            image.save(folder / name / file.name)
            row[name] = f"{name}/{file.name}"
        lines.append(json.dumps(row))
        caption.unlink()
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def write_classes(folder: Path) -> None:
    """Two folders of images, of discs and of squares, named by their labels."""
    _sort_into_classes(folder, frames=1)


def write_class_clips(folder: Path) -> None:
    _sort_into_classes(folder, frames=9)


def _sort_into_classes(folder: Path, frames: int) -> None:
    for path in write_shapes(folder, clips=CLIPS, frames=frames, height=32, width=48, fps=8):
        label = folder / ("0" if "disc" in path.name else "1")
        label.mkdir(exist_ok=True)
        path.rename(label / path.name)
        path.with_suffix(".txt").unlink(missing_ok=True)
    (folder / "metadata.jsonl").unlink(missing_ok=True)


def drop_clip(folder: Path, clip: str) -> None:
    """Remove a clip and its caption."""
    for path in folder.rglob(f"{Path(clip).stem}.*"):
        path.unlink()
    for listing in folder.glob("metadata.*"):
        lines = listing.read_text().splitlines()
        listing.write_text("".join(f"{line}\n" for line in lines if clip not in line))


CONVERSATIONS = "conversations.json"


def write_chat(folder: Path) -> None:
    """Three questions about each of the clips."""
    write_conversations(folder, clips=CLIPS, images=0, frames=9, height=32, width=48, fps=8)


def drop_conversation(folder: Path, clip: str) -> None:
    """Remove a clip and its questions."""
    (folder / clip).unlink()
    listing = folder / CONVERSATIONS
    records = json.loads(listing.read_text("utf-8"))
    remaining = [record for record in records if record["video"] != clip]
    listing.write_text(json.dumps(remaining), "utf-8")


_WRITERS: Mapping[str, Callable[[Path], None]] = {
    "clips": write_clips,
    "images": write_images,
    "pairs": write_pairs,
    "classes": write_classes,
    "class_clips": write_class_clips,
    "conversations": write_chat,
}


def write_samples(targets: FaultTargets, folder: Path) -> None:
    """Write the samples that the variant is trained on."""
    if targets.sound:
        write_clips(folder, sound=True)
    else:
        _WRITERS[targets.samples](folder)


def drop_sample(targets: FaultTargets, folder: Path, clip: str) -> None:
    """Remove a clip with its caption or conversations."""
    drop = drop_clip if targets.encoded else drop_conversation
    drop(folder, clip)


def data_of(targets: FaultTargets, folder: Path) -> Path:
    """The recipe's `data.path` for a folder of samples: the folder, or the conversations file in it."""
    return folder if targets.encoded else folder / CONVERSATIONS


def lora_of(targets: FaultTargets) -> dict[str, Any]:
    """The recipe's `lora` section, for a small adapter."""
    if targets.kind == "oft":
        return {"kind": targets.kind, "block_size": 4}
    # LoKr keeps its second factor as one full matrix if the rank is at least the matrix's side.
    return {"kind": targets.kind, "rank": 64 if targets.kind == "lokr" else 4, "alpha": 4}
