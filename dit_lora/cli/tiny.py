"""The verb `dit-lora tiny`: tiny checkpoints, random and trained, and clips of moving shapes to train them on."""

import shutil
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.arguments import NewFolder, complete_scene_shapes, complete_tiny_names, make_folder
from dit_lora.errors import DitLoraError
from dit_lora.families import get_families
from dit_lora.terminal import echo

EXAMPLES = {
    "tiny": (
        "tiny cogvideox-2b tiny/cogvideox-2b",
        "tiny moving-shapes tiny/moving-shapes",
        "tiny shapes moons --shape moon --clips 24",
        "tiny shapes clips",
        "tiny shapes images --frames 1",
        "tiny shapes pairs --pairs",
        "tiny shapes clips --sound",
        "tiny shapes conversations --chat",
    )
}

TRAINED_BASE = "moving-shapes"
"""Name of the trained base, a CogVideoX that makes clips of one moving shape (docs/benchmarks/world.md)."""
_BASE_FOLDER = Path(__file__).parents[1] / "models" / "moving_shapes"

_CHECKPOINT_OPTIONS = ("seed",)
_SHAPES_OPTIONS = ("clips", "frames", "height", "width", "fps", "shape", "classes", "pairs", "sound", "chat")
_checkpoint_option = partial(typer.Option, rich_help_panel="Options of checkpoints")
_shapes_option = partial(typer.Option, rich_help_panel="Options of shapes")


def tiny(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            help="Random checkpoint, such as cogvideox-2b (see dit-lora recipes --families), moving-shapes for a "
            "trained one, or shapes for clips.",
            autocompletion=complete_tiny_names,
        ),
    ],
    out: NewFolder,
    seed: Annotated[int, _checkpoint_option(help="Seed of the weights. Equal seeds give equal files.")] = 0,
    clips: Annotated[int, _shapes_option(min=1, help="Number of clips.")] = 6,
    frames: Annotated[
        int | None,
        _shapes_option(
            min=1, help="Frames of a clip; 1 for images (PNG). Default: 17, or 1 with --classes or --pairs."
        ),
    ] = None,
    height: Annotated[int, _shapes_option(min=16, help="Height in pixels, even.")] = 64,
    width: Annotated[int, _shapes_option(min=16, help="Width in pixels, even.")] = 96,
    fps: Annotated[float, _shapes_option(min=1, max=240, help="Frames per second.")] = 8.0,
    shape: Annotated[
        str | None,
        _shapes_option(
            help="Clips of this shape, such as moon, in the world of moving-shapes: 9 frames of 64x64 pixels. "
            "known: of all shapes that moving-shapes was trained on.",
            autocompletion=complete_scene_shapes,
        ),
    ] = None,
    classes: Annotated[
        bool, _shapes_option("--classes", help="Write one folder for each class, without captions.")
    ] = False,
    pairs: Annotated[
        bool, _shapes_option("--pairs", help="Write the picture before the edit and a mask too, for models that edit.")
    ] = False,
    sound: Annotated[bool, _shapes_option("--sound", help="Add a tone whose pitch depends on the shape.")] = False,
    chat: Annotated[
        bool, _shapes_option("--chat", help="Write conversations instead of captions, and as many images as clips.")
    ] = False,
) -> None:
    """Create a tiny checkpoint, random or trained, or with shapes a data set, to try dit-lora on a CPU."""
    if what != "shapes":
        _refuse_options(context, _SHAPES_OPTIONS, "tiny shapes")
        if what == TRAINED_BASE:
            _refuse_options(context, _CHECKPOINT_OPTIONS, "a random checkpoint")
            copy_trained_base(out)
            return
        _build_checkpoint(what, out, seed)
        return
    _refuse_options(context, _CHECKPOINT_OPTIONS, "a checkpoint")
    if shape is not None:
        _refuse_options(
            context,
            ("frames", "height", "width", "fps", "classes", "pairs", "sound", "chat"),
            "shapes without --shape",
        )
        _write_scenes(out, shape, clips)
        return
    _write_shapes(
        out,
        clips=clips,
        frames=frames,
        height=height,
        width=width,
        fps=fps,
        classes=classes,
        pairs=pairs,
        sound=sound,
        chat=chat,
    )


def copy_trained_base(folder: Path) -> None:
    """Copy the trained base of this package to a new folder. Raises `DitLoraError` if the folder exists."""
    make_folder(folder)
    shutil.copytree(_BASE_FOLDER, folder, dirs_exist_ok=True)
    echo(f"wrote {folder}")


def _write_scenes(folder: Path, shape: str, clips: int) -> None:
    """Write clips of one shape with captions. Raises `DitLoraError` for an unknown shape."""
    import torch

    from dit_lora.data.synthetic.scenes import KNOWN_SHAPES, SHAPES, draw_scene, list_balanced_scenes, write_scenes

    if shape not in (*SHAPES, "known"):
        raise DitLoraError(f"unknown shape {shape!r}; choose one of {', '.join(SHAPES)}, known")
    make_folder(folder)
    generator = torch.Generator().manual_seed(0)
    if shape == "known":
        scenes = [draw_scene(generator, KNOWN_SHAPES) for _ in range(clips)]
    else:
        scenes = list_balanced_scenes(shape, clips)
    write_scenes(folder, scenes, generator)
    echo(f"wrote {clips} clips to {folder}")


def _refuse_options(context: typer.Context, options: tuple[str, ...], owner: str) -> None:
    """Raise `DitLoraError` if one of these options was given on the command line. They apply only to `owner`."""
    for option in options:
        # Skip defaults: only options that the user gave count.
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":
            raise DitLoraError(f"--{option} is an option of {owner}; remove it")


def _build_checkpoint(variant: str, folder: Path, seed: int) -> None:
    """Build the tiny random checkpoint of this name. Raises `DitLoraError` if no family has it."""
    families = get_families().values()
    family_of = {name: family for family in families for name in family.tiny_variants}
    if variant not in family_of:
        raise DitLoraError(f"unknown tiny checkpoint {variant!r}; choose one of {', '.join(family_of)}")
    # Generators take 64 bits.
    if not -(2**63) <= seed < 2**63:
        raise DitLoraError(f"--seed must be below 2^63; got {seed}")
    from dit_lora.environment.progress_bar import hide_progress_bars

    make_folder(folder)
    hide_progress_bars()
    family_of[variant].build_tiny_checkpoint(variant, folder, seed)
    echo(f"wrote {folder}")


def _write_shapes(
    folder: Path,
    *,
    clips: int,
    frames: int | None,
    height: int,
    width: int,
    fps: float,
    classes: bool,
    pairs: bool,
    sound: bool,
    chat: bool,
) -> None:
    """Write a synthetic data set of moving shapes: clips or images.

    Raises `DitLoraError` if the options exclude each other.
    """
    from dit_lora.data.synthetic.clips import write_class_folders, write_shapes
    from dit_lora.data.synthetic.conversations import write_conversations
    from dit_lora.data.synthetic.pairs import write_edit_pairs

    if chat and (classes or pairs or frames == 1):
        raise DitLoraError("--chat writes clips and images; remove --classes, --pairs and --frames 1")
    if pairs and classes:
        raise DitLoraError("--pairs writes captions, and --classes none; remove one of them")
    if sound and (chat or classes or pairs or frames == 1):
        raise DitLoraError("--sound writes clips; remove --chat, --classes, --pairs and --frames 1")
    frames = frames or (1 if classes or pairs else 17)
    # Chroma is stored at half the resolution.
    if frames > 1 and (height % 2 or width % 2):
        raise DitLoraError(f"height and width must be even for H.264; got {height}x{width}")
    # After all checks, so that no empty folder remains after an error.
    make_folder(folder)
    size = {"height": height, "width": width, "frames": frames}
    if classes:
        write_class_folders(folder, images=clips, fps=fps, **size)
    elif pairs:
        write_edit_pairs(folder, pairs=clips, fps=fps, **size)
    elif chat:
        write_conversations(folder, clips=clips, images=clips, fps=fps, **size)
    else:
        write_shapes(folder, clips=clips, fps=fps, sound=sound, **size)
    description = "clips and as many images" if chat else "images" if frames == 1 else "clips"
    description += ", each with the picture before the edit" if pairs else ""
    echo(f"wrote {clips} {description} to {folder}")
