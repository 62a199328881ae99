"""Clips and pictures that nobody has described, or not all of them."""

from pathlib import Path

from dit_lora.data.sources.caption_table import CaptionTable, lock_table
from dit_lora.data.synthetic.clips import write_shapes

HOSTILE_CAPTION = '</script><img src=x onerror="window.hit=1"><script>window.hit=1</script>'


def write_without_captions(folder: Path, clips: int, stills: int) -> None:
    """Write clips, and pictures in a folder below, without the captions that come with them."""
    write_shapes(folder, clips=clips, frames=5, height=32, width=48, fps=8)
    write_shapes(folder / "stills", clips=stills, frames=1, height=32, width=32, fps=8)
    for path in (*folder.rglob("*.txt"), *folder.rglob("metadata.jsonl")):
        path.unlink()


def write_captioned_folder(folder: Path) -> Path:
    """Clips and a picture with captions that say the same, something hostile, and nothing."""
    write_without_captions(folder, clips=4, stills=1)
    captions = ["the same", "the same", HOSTILE_CAPTION, "a sks dog"]
    with lock_table(folder) as table:
        table.write_captions(dict(zip(CaptionTable.read(folder).media, captions, strict=False)))
    return folder
