"""A run that kills itself while it writes its first checkpoint. `benchmarks.faults.phases` starts it as a process."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from benchmarks.faults.world import Engine, engine_of, prepared_run
from dit_lora.config.load import load_recipe
from dit_lora.families import get_family
from dit_lora.training.checkpoints import files as checkpoints
from dit_lora.training.fit import fit


def main(config: Path, engine: Engine = "ddp") -> None:
    recipe = load_recipe(config)
    opened_checkpoint = get_family(recipe.model.family).open(recipe.model, recipe)
    run = prepared_run(recipe, Accelerator(cpu=True), opened_checkpoint, engine)
    write = checkpoints._write_synced

    def killed(path: Path, data: Any) -> None:
        # Half of the file is on the disk, and nothing of this process can clean up.
        write(path, data)
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    # The seam that every file of a checkpoint passes.
    checkpoints._write_synced = killed
    fit(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), engine_of(sys.argv[2]))
