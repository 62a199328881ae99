"""A run that is killed in the middle of its first checkpoint; a process of its own, for `dit_lora.faults.phases`."""

import os
import signal
import sys
from pathlib import Path

from accelerate import Accelerator

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import recipe_groups
from dit_lora.config import load_recipe
from dit_lora.families import get_family
from dit_lora.numerics.precision import choose_precision
from dit_lora.training import checkpoint as checkpoints
from dit_lora.training.precompute import precompute
from dit_lora.training.run import fit, prepare
from dit_lora.training.runtime import Runtime


def main(config: Path) -> None:
    recipe = load_recipe(config)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=recipe.train.accumulate)
    precision = choose_precision(recipe.model.dtype, accelerator.device)
    runtime = Runtime(recipe, accelerator, precision)
    family = get_family(recipe.model.family)
    opened = family.open(recipe.model)
    encoded = precompute(runtime, opened)
    transformer = opened.load_transformer(precision.dtype)
    attach_lora(transformer, recipe.lora, family.lora_targets, seed=recipe.train.seed)
    groups = recipe_groups(transformer, recipe.optim.groups, family.group_patterns)
    run = prepare(runtime, family, opened, encoded, transformer, groups, None)
    write = checkpoints._write_synced

    def killed(path: Path, data: bytes) -> None:
        write(path, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoints._write_synced = killed
    fit(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
