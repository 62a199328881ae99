"""The verbs of `dit-lora cache`: the cache of encoded clips and captions."""

from functools import partial
from typing import Annotated

import typer

from dit_lora.cli.arguments import Overrides, RecipeFile, complete_recipe_files
from dit_lora.cli.json_output import JsonFlag, write_answer
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
    str, typer.Argument(help="A recipe (.yaml), or a cache's folder.", autocompletion=complete_recipe_files)
]


@cache.command("build")
def cache_build(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Encode everything that a recipe trains on; `accelerate launch -m dit_lora cache build` shares the work."""
    from dit_lora.commands.cache import build_cache

    build_cache(recipe, overrides or [])


@cache.command("verify")
def cache_verify(
    context: typer.Context,
    target: CacheTarget,
    overrides: Overrides = None,
    set_aside: Annotated[bool, typer.Option("--set-aside", help="Mark bad entries, to be made anew.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Read every entry: digest, finite, in range; exit 1 if one is bad."""
    from dit_lora.commands.cache import verify_cache

    result = verify_cache(target, overrides or [], mark_bad=set_aside)
    tell = partial(echo, result.format_text())
    write_answer(context, as_json, result.record(), tell, passed=result.passed)


@cache.command("stats")
def cache_stats(
    context: typer.Context, target: CacheTarget, overrides: Overrides = None, as_json: JsonFlag = False
) -> None:
    """Count entries, files and bytes, by kind."""
    from dit_lora.commands.cache import count_cache_entries

    result = count_cache_entries(target, overrides or [])
    write_answer(context, as_json, result.record(), partial(echo, result.format_text()))


@cache.command("prune")
def cache_prune(
    context: typer.Context,
    target: CacheTarget,
    overrides: Overrides = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="Remove what this recipe does not use; repeat for each that stays.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove bad and double entries and leftovers; with --keep, also what no such recipe uses."""
    from dit_lora.commands.cache import prune_cache

    result = prune_cache(target, overrides or [], keep=keep or [])
    write_answer(context, as_json, result.record(), partial(echo, result.format_text()))
