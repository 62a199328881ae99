"""The verbs `recipes` and `init`: list the recipes, and create a folder to train in."""

import re
import shlex
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from dit_lora.cli.arguments import complete_families, complete_launch_config_names, complete_recipes
from dit_lora.cli.json_output import JsonFlag, write_command_result
from dit_lora.config.catalog import PackagedRecipe, list_accelerate_configs, map_recipe_paths, write_run_folder
from dit_lora.errors import DitLoraError
from dit_lora.families import FAMILIES, get_default_recipes, get_families
from dit_lora.terminal import echo

EXAMPLES = {
    "recipes": ("recipes", "recipes --family cogvideox", "recipes --families"),
    "init": ("init smoke/cogvideox my-run", "init cogvideox/5b_t2v kitten --accelerate ddp"),
}


def recipes(
    context: typer.Context,
    family: Annotated[
        str | None, typer.Option(help="Only recipes of this family.", autocompletion=complete_families)
    ] = None,
    list_families: Annotated[
        bool, typer.Option("--families", help="List the families and their tiny checkpoints instead.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the recipes that come with dit-lora. Those called smoke/... train on a CPU."""
    if family is not None and family not in FAMILIES:
        raise DitLoraError(f"unknown family {family!r}; choose one of {', '.join(FAMILIES)}")
    if list_families:
        variants = {
            name: list(loaded_family.tiny_variants)
            for name, loaded_family in get_families().items()
            if family in (None, name)
        }
        lines = [
            textwrap.fill(f"{name}: tiny {', '.join(tiny)}", 80, subsequent_indent="  ", break_on_hyphens=False)
            for name, tiny in variants.items()
        ]
        write_command_result(context, as_json, {"families": variants}, lambda: echo("\n".join(lines)))
        return
    defaults = get_default_recipes()
    # All recipes are read, also for one family: they are small files.
    records = []
    for name, path in map_recipe_paths().items():
        try:
            records.append(PackagedRecipe.from_file(name, path).to_json_entry(defaults))
        except DitLoraError as error:
            # A recipe of another package must not end a command that does not need it.
            echo(f"warning: {error}", err=True)
    selected_records = [record for record in records if family in (None, record["family"])]
    write_command_result(context, as_json, {"recipes": selected_records}, lambda: _print_recipes(selected_records))


def init(
    recipe: Annotated[
        str,
        typer.Argument(
            help="Recipe, such as cogvideox/5b_t2v, or a family. See dit-lora recipes.",
            autocompletion=complete_recipes,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create, or an empty one.")],
    accelerate: Annotated[
        str | None,
        typer.Option(
            help="Accelerate config: cpu, one_gpu, ddp, fsdp2 or another one. Default: the recipe's.",
            autocompletion=complete_launch_config_names,
        ),
    ] = None,
) -> None:
    """Create a folder to train in, with recipe, training script and Accelerate config."""
    selected_recipe = PackagedRecipe.from_name(recipe, get_default_recipes())
    selected_recipe.require_complete_recipe()
    # The recipe's own launch is the default.
    config = accelerate or selected_recipe.accelerate_config
    if config not in list_accelerate_configs():
        names = ", ".join(list_accelerate_configs())
        raise DitLoraError(f"unknown Accelerate config {config!r}; choose one of {names}")
    written = write_run_folder(selected_recipe, out, config)
    echo(f"wrote {', '.join(map(str, written))}")
    # The user gave a family, so say which recipe it stands for.
    if recipe in FAMILIES:
        echo(f"It is the recipe {selected_recipe.name}. For others of the family: dit-lora recipes --family {recipe}")
    if not selected_recipe.is_smoke:
        data = selected_recipe.values["data"]["path"]
        echo(f"Put your data into {data}, or change data.path in {selected_recipe.file_name}.")
    echo("Next:")
    for line in _list_next_commands(selected_recipe, out, config):
        echo(f"  {line}")


def _list_next_commands(recipe: PackagedRecipe, folder: Path, config: str) -> list[str]:
    # The commands below use paths relative to the new folder.
    lines = [] if folder.resolve() == Path.cwd() else [f"cd {shlex.quote(str(folder))}"]
    # Commands that prepare the run, such as `dit-lora tiny`.
    lines += recipe.commands[:-1]
    # Smoke recipes have commands that create their data.
    if not recipe.is_smoke:
        # Chat models train on conversations, edits on what is to be done, and others on classes.
        if recipe.facts["Task"].startswith(("text-to-", "image-to-video")):
            describe = f"dit-lora caption {recipe.values['data']['path']} --model Qwen/Qwen2.5-VL-7B-Instruct"
            lines.append(f"{describe} --recipe {recipe.file_name}  # where captions are missing")
        lines += [f"dit-lora audit {recipe.file_name}", f"dit-lora plan {recipe.file_name}"]
    launch = recipe.build_launch_command(config)
    # Configs that `dit-lora train` chooses itself.
    if config in ("cpu", "one_gpu"):
        launch = f"dit-lora train {launch.partition(' lora.py ')[2]}"
    return [*lines, launch]


def _print_recipes(records: list[dict[str, Any]]) -> None:
    """Print the list of recipes as a table in 80 columns. Only the names of models are wrapped."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("recipe", "task", "memory", "time"):
        table.add_column(heading, no_wrap=True)
    table.add_column("model", overflow="fold")
    for record in records:
        memory, time = _extract_memory_or_time(record["memory"]), _extract_memory_or_time(record["time"])
        table.add_row(record["name"], record["task"], memory, time, Path(record["model"]).name)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "smoke/: a tiny random model, on a CPU. +: without activations. -: not measured yet.\n"
        "More is in the comment at the top of each recipe.\n"
        "To train with one: dit-lora init RECIPE DIR",
        markup=False,
        soft_wrap=True,
    )


def _extract_memory_or_time(text: str) -> str:
    """Extract the first number with its unit from a recipe's text on memory or time.

    The result is `-` if the text does not begin with one.
    """
    # A number and its unit, after an optional `about` or `computed:`.
    match = re.match(r"(?:about |computed: )?(\d+(?:\.\d+)?) (GiB|GB|MB|seconds)", text)
    if match is None:
        return "-"
    unit = "s" if match[2] == "seconds" else match[2]
    return f"{match[1]} {unit}{' +' if 'activations' in text.lower() else ''}"
