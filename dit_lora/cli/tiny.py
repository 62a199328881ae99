"""The verbs `dit-lora tiny`, `shapes` and `families`: random checkpoints and data to try things on, and of what they can be."""

from typing import Annotated

import typer

from dit_lora.cli.arguments import NewFolder, make_folder, tiny_variants
from dit_lora.errors import DitLoraError
from dit_lora.families import every_family
from dit_lora.terminal import echo

EXAMPLES = {
    "families": ("families",),
    "tiny": ("tiny cogvideox-2b tiny/cogvideox-2b",),
    "shapes": (
        "shapes clips",
        "shapes images --frames 1",
        "shapes pairs --pairs",
        "shapes clips --sound",
        "shapes conversations --chat",
    ),
}


def families() -> None:
    """List the model families and the tiny checkpoints that can be built of each."""
    for name, family in every_family().items():
        echo(f"{name}: tiny {', '.join(family.tiny_variants)}")


def tiny(
    variant: Annotated[
        str,
        typer.Argument(
            help="For instance cogvideox-2b; see `families`.", autocompletion=tiny_variants
        ),
    ],
    out: NewFolder,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal bytes.")] = 0,
) -> None:
    """Build a complete random checkpoint, small enough for a CPU, without the Hub."""
    families = every_family().values()
    family_of = {name: family for family in families for name in family.tiny_variants}
    if variant not in family_of:
        raise DitLoraError(f"no tiny checkpoint {variant!r}; known: {', '.join(family_of)}")
    from dit_lora.training.session.session import quiet_libraries

    make_folder(out)
    quiet_libraries()
    family_of[variant].build_tiny(variant, out, seed)
    echo(f"wrote {out}")


def shapes(
    out: NewFolder,
    clips: Annotated[int, typer.Option(min=1)] = 6,
    frames: Annotated[
        int | None,
        typer.Option(min=1, help="1 for images (PNG); by default 17, of --classes and --pairs 1."),
    ] = None,
    height: Annotated[int, typer.Option(min=16, help="Pixels, even.")] = 64,
    width: Annotated[int, typer.Option(min=16, help="Pixels, even.")] = 96,
    fps: Annotated[float, typer.Option(min=1, max=240)] = 8.0,
    classes: Annotated[bool, typer.Option("--classes", help="One folder a class.")] = False,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs", help="With what each is made from, and a mask, for models that edit."
        ),
    ] = False,
    sound: Annotated[
        bool, typer.Option("--sound", help="Clips with a tone whose pitch goes with the shape.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Questions in place of captions; as many images again.")
    ] = False,
) -> None:
    """Write captioned clips of moving shapes (H.264), to try things on; images with --frames 1, --classes or --pairs."""
    from dit_lora.data.synthetic.clips import write_class_folders, write_shapes
    from dit_lora.data.synthetic.conversations import write_conversations
    from dit_lora.data.synthetic.pairs import write_edit_pairs

    if chat and (classes or pairs or frames == 1):
        raise DitLoraError(
            "--chat writes clips and images; leave out --classes, --pairs and --frames 1"
        )
    if pairs and classes:
        raise DitLoraError("--pairs have captions, --classes have none; leave out one of them")
    if sound and (chat or classes or pairs or frames == 1):
        raise DitLoraError(
            "--sound writes clips; leave out --chat, --classes, --pairs and --frames 1"
        )
    frames = frames or (1 if classes or pairs else 17)
    if frames > 1 and (height % 2 or width % 2):
        raise DitLoraError(f"H.264 takes even sizes; got {height}x{width}")
    make_folder(out)
    size = {"height": height, "width": width, "frames": frames}
    if classes:
        write_class_folders(out, images=clips, fps=fps, **size)
    elif pairs:
        write_edit_pairs(out, pairs=clips, fps=fps, **size)
    elif chat:
        write_conversations(out, clips=clips, images=clips, fps=fps, **size)
    else:
        write_shapes(out, clips=clips, fps=fps, sound=sound, **size)
    what = "clips and as many images" if chat else "images" if frames == 1 else "clips"
    what += ", each with what it is made from" if pairs else ""
    echo(f"wrote {clips} {what} to {out}")
