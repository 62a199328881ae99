"""The verb `dit-lora tiny`: random checkpoints, and clips of moving shapes to train them on."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.arguments import NewFolder, complete_tiny_names, make_folder
from dit_lora.errors import DitLoraError
from dit_lora.families import get_families
from dit_lora.terminal import echo

EXAMPLES = {
    "tiny": (
        "tiny cogvideox-2b tiny/cogvideox-2b",
        "tiny shapes clips",
        "tiny shapes images --frames 1",
        "tiny shapes pairs --pairs",
        "tiny shapes clips --sound",
        "tiny shapes conversations --chat",
    )
}

_CHECKPOINT_OPTIONS = ("seed",)
_SHAPES_OPTIONS = ("clips", "frames", "height", "width", "fps", "classes", "pairs", "sound", "chat")
_checkpoint_option = partial(typer.Option, rich_help_panel="Options of checkpoints")
_shapes_option = partial(typer.Option, rich_help_panel="Options of shapes")


def tiny(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            help="A checkpoint, for instance cogvideox-2b (see `recipes --families`), or `shapes`.",
            autocompletion=complete_tiny_names,
        ),
    ],
    out: NewFolder,
    seed: Annotated[int, _checkpoint_option(help="Equal seeds give equal bytes.")] = 0,
    clips: Annotated[int, _shapes_option(min=1)] = 6,
    frames: Annotated[
        int | None, _shapes_option(min=1, help="1 for images (PNG); by default 17, of --classes and --pairs 1.")
    ] = None,
    height: Annotated[int, _shapes_option(min=16, help="Pixels, even.")] = 64,
    width: Annotated[int, _shapes_option(min=16, help="Pixels, even.")] = 96,
    fps: Annotated[float, _shapes_option(min=1, max=240)] = 8.0,
    classes: Annotated[bool, _shapes_option("--classes", help="One folder a class.")] = False,
    pairs: Annotated[
        bool, _shapes_option("--pairs", help="With what each is made from, and a mask, for models that edit.")
    ] = False,
    sound: Annotated[
        bool, _shapes_option("--sound", help="Clips with a tone whose pitch goes with the shape.")
    ] = False,
    chat: Annotated[
        bool, _shapes_option("--chat", help="Questions in place of captions; as many images again.")
    ] = False,
) -> None:
    """Build a tiny random checkpoint that trains on a CPU, without the Hub; or `shapes`: captioned clips or images."""
    if what != "shapes":
        _refuse_options(context, _SHAPES_OPTIONS, "tiny shapes")
        _build_checkpoint(what, out, seed)
        return
    _refuse_options(context, _CHECKPOINT_OPTIONS, "a checkpoint")
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
        raise DitLoraError(f"no tiny checkpoint {variant!r}; known: {', '.join(family_of)}")
    from dit_lora.training.session.session import hide_progress_bars

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
        raise DitLoraError("--chat writes clips and images; leave out --classes, --pairs and --frames 1")
    if pairs and classes:
        raise DitLoraError("--pairs have captions, --classes have none; leave out one of them")
    if sound and (chat or classes or pairs or frames == 1):
        raise DitLoraError("--sound writes clips; leave out --chat, --classes, --pairs and --frames 1")
    frames = frames or (1 if classes or pairs else 17)
    # Chroma is stored at half the resolution.
    if frames > 1 and (height % 2 or width % 2):
        raise DitLoraError(f"H.264 takes even sizes; got {height}x{width}")
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
    description += ", each with what it is made from" if pairs else ""
    echo(f"wrote {clips} {description} to {folder}")
