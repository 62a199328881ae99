"""The verbs `dit-lora tiny` and `dit-lora families`: random checkpoints to try things on, and of what they can be."""

from typing import Annotated

import typer

from dit_lora.cli.arguments import NewFolder, make_folder, tiny_variants
from dit_lora.errors import DitLoraError
from dit_lora.families import every_family
from dit_lora.terminal import echo

EXAMPLES = {"families": ("families",), "tiny": ("tiny cogvideox-2b tiny/cogvideox-2b",)}


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
