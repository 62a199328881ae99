"""The verb `dit-lora train`: trains with a recipe, in processes that Accelerate starts."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.arguments import Overrides, RecipeFile
from dit_lora.errors import InterruptedRunError
from dit_lora.terminal import echo

EXAMPLES = {
    "train": (
        "train cogvideox_5b_t2v.yaml data.path=clips run.dir=runs/kitten",
        "train cogvideox_5b_t2v.yaml train.resume=auto",
        "train cogvideox_5b_t2v.yaml --config-file fsdp2.yaml",
    )
}


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    config_file: Annotated[
        Path | None,
        typer.Option(help="Accelerate config. Default: all GPUs of this machine, or its CPU.", show_default=False),
    ] = None,
) -> None:
    """Train with a recipe. Ctrl-C saves and stops; train.resume=auto continues.

    Runs the script of the package. Exit code 3 if the guard stopped the run.
    """
    from dit_lora.config.catalog import is_edited_script
    from dit_lora.config.load import load_recipe
    from dit_lora.environment.versions import read_launch_config
    from dit_lora.families import get_family
    from dit_lora.training.finished import is_finished
    from dit_lora.training.session.early_checks import require_recipe_paths

    # All of this is checked again by the run, a dozen seconds of imports later.
    settings = load_recipe(recipe, overrides or [])
    get_family(settings.model.family)
    if config_file is not None:
        read_launch_config(config_file)
    require_recipe_paths(settings)
    # For those who wait at a terminal; a log file has the folder from the run itself.
    if sys.stderr.isatty():
        echo(f"training with {recipe}; results go to {settings.run.dir}", err=True)
    # `dit-lora init` puts a copy beside the recipe, which people edit.
    script = Path(recipe).parent / "lora.py"
    if script.is_file() and is_edited_script(script):
        echo(f"note: {script} differs from the package's script, which is used", err=True)
        echo(f"      to run yours: accelerate launch {script} {recipe}", err=True)

    from dit_lora.training.session.accelerate import launch_training

    try:
        code = launch_training([recipe, *(overrides or [])], config_file)
    except KeyboardInterrupt as error:
        # Before the run could handle it, or while its process ended.
        next_step = "to continue, add train.resume=auto"
        if is_finished(settings):
            next_step = f"the run in {settings.run.dir} is finished"
        raise InterruptedRunError(next_step, 130) from error
    raise typer.Exit(code)
