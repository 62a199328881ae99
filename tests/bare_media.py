"""Clips and pictures that nobody has described."""

from pathlib import Path

from dit_lora.data.synthetic.clips import write_shapes


def write_without_captions(folder: Path, clips: int, stills: int) -> None:
    """Write clips, and pictures in a folder below, without the captions that come with them."""
    write_shapes(folder, clips=clips, frames=5, height=32, width=48, fps=8)
    write_shapes(folder / "stills", clips=stills, frames=1, height=32, width=32, fps=8)
    for path in (*folder.rglob("*.txt"), *folder.rglob("metadata.jsonl")):
        path.unlink()
