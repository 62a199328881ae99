"""The verb `dit-lora guard`: a script that knows nothing of it, guarded."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.config.ladder import LoopConfig

EXAMPLES = {"guard": ("guard train.py --lr 1e-4", "guard --folder runs/mine -m my_package.train --config train.yaml")}


def guard(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script, or with -m a module.")],
    folder: Annotated[
        Path, typer.Option(help="Gets events.jsonl, bundles and, at a stop, the last good weights.")
    ] = Path("dit_lora_guard"),
    max_skips: Annotated[
        int | None,
        typer.Option(
            help="End the script once so many steps of the last 100 were skipped for something new; by default never.",
            show_default=False,
        ),
    ] = None,
    snapshot_every: Annotated[
        int, typer.Option(help="Steps between snapshots of what is trained; 0 for none.")
    ] = LoopConfig.snapshot_every,
    bundles: Annotated[
        int, typer.Option(help="Events of which a process keeps a bundle for dit-lora replay.")
    ] = LoopConfig.bundles,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="Check base weights, gradients and attention at the first step.")
    ] = LoopConfig.preflight,
    monitor_every: Annotated[
        int, typer.Option(help="Steps between statistics of every module; 0 for none.")
    ] = LoopConfig.monitor_every,
    spike_threshold: Annotated[
        float | None, typer.Option(help="Report gradient norms this many MADs above their median, for instance 8.")
    ] = LoopConfig.spike_threshold,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name.")] = False,
) -> None:
    """Run a training script with every optimizer watched; everything after SCRIPT is passed to it.

    On several processes: accelerate launch -m dit_lora guard SCRIPT, or torchrun -m dit_lora guard SCRIPT.
    """
    from dit_lora.guard.attach.run_script import run_script

    config = LoopConfig.from_script_options(
        max_skips,
        snapshot_every=snapshot_every,
        bundles=bundles,
        preflight=preflight,
        monitor_every=monitor_every,
        spike_threshold=spike_threshold,
    )
    # `context.args` is everything after the script's name.
    run_script(script, context.args, config=config, folder=folder, module=module)
