"""The verb `dit-lora guard`: guards a training script without changes to it."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.config.recovery_settings import GRADIENT_CHECK_INTERVAL, LoopConfig

EXAMPLES = {"guard": ("guard train.py --lr 1e-4", "guard --folder runs/mine -m my_package.train --config train.yaml")}


def guard(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python script, or with -m the name of a module.")],
    folder: Annotated[
        Path,
        typer.Option(help="Folder for events.jsonl, bundles and, if the script is stopped, the last good weights."),
    ] = Path("dit_lora_guard"),
    max_skips: Annotated[
        int | None,
        typer.Option(
            help="Stop once this many of the last 100 steps were skipped for different causes. Default: never.",
            show_default=False,
        ),
    ] = None,
    snapshot_every: Annotated[
        int, typer.Option(help="Steps between snapshots of the trained weights. 0: no snapshots.")
    ] = LoopConfig.snapshot_every,
    bundles: Annotated[
        int, typer.Option(help="Number of events for which a bundle for dit-lora replay is kept, per process.")
    ] = LoopConfig.bundles,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="Check base weights, gradients and attention at the first step.")
    ] = LoopConfig.preflight,
    monitor_every: Annotated[
        int, typer.Option(help="Steps between statistics of every module. 0: no statistics.")
    ] = LoopConfig.monitor_every,
    spike_threshold: Annotated[
        float | None,
        typer.Option(
            help="Report gradient norms that are this many median absolute deviations above the median, such as 8."
        ),
    ] = LoopConfig.spike_threshold,
    gradient_check: Annotated[
        bool,
        typer.Option(
            "--gradient-check",
            help="Compare backward passes with the slopes of the models' outputs in the first step, then every "
            f"{GRADIENT_CHECK_INTERVAL} steps.",
        ),
    ] = False,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
) -> None:
    """Run a training script under the guard. Everything after SCRIPT is passed to it.

    With several processes, use one of

    accelerate launch -m dit_lora guard SCRIPT

    torchrun -m dit_lora guard SCRIPT
    """
    from dit_lora.guard.attach.run_script import run_script

    config = LoopConfig.from_script_options(
        max_skips,
        snapshot_every=snapshot_every,
        bundles=bundles,
        preflight=preflight,
        monitor_every=monitor_every,
        spike_threshold=spike_threshold,
        gradient_every=GRADIENT_CHECK_INTERVAL if gradient_check else 0,
    )
    # `context.args` is everything after the script's name.
    run_script(script, context.args, config=config, folder=folder, module=module)
