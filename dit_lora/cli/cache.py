"""The verbs of `dit-lora cache`: the cache of encoded clips and captions."""

from functools import partial
from typing import Annotated

import typer

from dit_lora.cli.arguments import Overrides, RecipeFile, complete_recipe_files
from dit_lora.cli.json_output import JsonFlag, write_command_result
from dit_lora.terminal import echo

EXAMPLES = {
    "cache": ("cache build cogvideox_5b_t2v.yaml", "cache stats runs/cache"),
    "cache build": ("cache build cogvideox_5b_t2v.yaml data.path=clips",),
    "cache verify": ("cache verify runs/cache --set-aside",),
    "cache stats": ("cache stats runs/cache",),
    "cache prune": ("cache prune runs/cache --keep cogvideox_5b_t2v.yaml",),
}

cache = typer.Typer(help="Fill, check and clean up the cache of encoded clips and captions.")
CacheTarget = Annotated[
    str, typer.Argument(help="A recipe (.yaml), or the folder of a cache.", autocompletion=complete_recipe_files)
]


@cache.command("build")
def cache_build(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Encode all clips and captions that a recipe trains on.

    To use several GPUs: accelerate launch -m dit_lora cache build RECIPE.
    """
    from dit_lora.commands.cache import build_cache

    build_cache(recipe, overrides or [])


@cache.command("verify")
def cache_verify(
    context: typer.Context,
    target: CacheTarget,
    overrides: Overrides = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Mark bad entries, so that they are encoded again.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Read every entry and check its digest and values. Exit code 1 if one is bad."""
    from dit_lora.commands.cache import verify_cache

    result = verify_cache(target, overrides or [], mark_bad=set_aside)
    tell = partial(echo, result.format_text())
    write_command_result(context, as_json, result.record(), tell, passed=result.passed)


@cache.command("stats")
def cache_stats(
    context: typer.Context, target: CacheTarget, overrides: Overrides = None, as_json: JsonFlag = False
) -> None:
    """Count entries, files and bytes of each kind."""
    from dit_lora.commands.cache import count_cache_entries

    result = count_cache_entries(target, overrides or [])
    write_command_result(context, as_json, result.record(), partial(echo, result.format_text()))


@cache.command("prune")
def cache_prune(
    context: typer.Context,
    target: CacheTarget,
    overrides: Overrides = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Keep what this recipe uses and remove the rest. Repeat for several recipes."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove bad entries, duplicates and leftover files. With --keep, also entries that no given recipe uses."""
    from dit_lora.commands.cache import prune_cache

    result = prune_cache(target, overrides or [], keep=keep or [])
    write_command_result(context, as_json, result.record(), partial(echo, result.format_text()))
