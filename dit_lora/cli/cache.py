"""The verbs of `dit-lora cache`: the cache of encoded clips and captions."""

from functools import partial
from typing import Annotated

import typer

from dit_lora.cli.arguments import Overrides, RecipeFile, recipe_files
from dit_lora.cli.json_output import JsonFlag, answer
from dit_lora.terminal import echo

EXAMPLES = {
    "cache": ("cache build cogvideox_5b_t2v.yaml", "cache stats runs/cache"),
    "cache build": ("cache build cogvideox_5b_t2v.yaml data.path=clips",),
    "cache verify": ("cache verify runs/cache --set-aside",),
    "cache stats": ("cache stats runs/cache",),
    "cache prune": ("cache prune runs/cache --keep cogvideox_5b_t2v.yaml",),
}

cache = typer.Typer(help="Fill, check and tidy the cache of encoded clips and captions.")
CacheTarget = Annotated[
    str,
    typer.Argument(help="A recipe (.yaml), or a cache's folder.", autocompletion=recipe_files),
]


@cache.command("build")
def cache_build(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Encode everything that a recipe trains on; `accelerate launch -m dit_lora cache build` shares the work."""
    from dit_lora.commands.cache import build

    build(recipe, overrides or [])


@cache.command("verify")
def cache_verify(
    context: typer.Context,
    target: CacheTarget,
    overrides: Overrides = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Mark bad entries, to be made anew.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Read every entry: digest, finite, in range; exit 1 if one is bad."""
    from dit_lora.commands.cache import verify

    result = verify(target, overrides or [], set_aside=set_aside)
    tell = partial(echo, result.told())
    answer(context, as_json, result.record(), tell, passed=result.passed)


@cache.command("stats")
def cache_stats(
    context: typer.Context,
    target: CacheTarget,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
) -> None:
    """Count entries, files and bytes, by kind."""
    from dit_lora.commands.cache import stats

    result = stats(target, overrides or [])
    answer(context, as_json, result.record(), partial(echo, result.told()))


@cache.command("prune")
def cache_prune(
    context: typer.Context,
    target: CacheTarget,
    overrides: Overrides = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Remove what this recipe does not use; repeat for each that stays."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove bad and double entries and leftovers; with --keep, also what no such recipe uses."""
    from dit_lora.commands.cache import prune

    result = prune(target, overrides or [], keep=keep or [])
    answer(context, as_json, result.record(), partial(echo, result.told()))
