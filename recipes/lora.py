"""Fine-tuning of a diffusion transformer or a chat model: one script, the recipe's YAML says which.

accelerate launch recipes/lora.py recipes/cogvideox/5b_t2v.yaml data.path=clips run.dir=runs/kitten
"""

import sys
from typing import Any

from dit_lora.errors import DitLoraError, reported_errors
from dit_lora.families import get_family
from dit_lora.hub.at_end import push_result, require_hub
from dit_lora.recipe import load_recipe
from dit_lora.report.live import Reporting
from dit_lora.training.checkpoint import find_checkpoint
from dit_lora.training.facts import write_facts
from dit_lora.training.finish import finish, require_verified
from dit_lora.training.fit import fit
from dit_lora.training.optimizer import require_optimizer
from dit_lora.training.prepare import prepare
from dit_lora.training.runtime import Runtime, require_free_folder, running
from dit_lora.training.summary import summary
from dit_lora.training.tasks import task_of
from dit_lora.training.told import status_noted, write_data_record
from dit_lora.training.trainable import require_quantization

USAGE = "accelerate launch recipes/lora.py RECIPE.yaml [key.path=value ...]"


def main(argv: list[str]) -> None:
    if argv[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{__doc__}\nusage: {USAGE}\n")
        return
    if not argv:
        raise DitLoraError(f"usage: {USAGE}")
    recipe = load_recipe(argv[0], argv[1:])
    family = get_family(recipe.model.family)
    checkpoint = family.open(recipe.model, recipe)

    with running(recipe) as runtime:
        train(runtime, family, checkpoint, argv[0])


def train(runtime: Runtime, family: Any, checkpoint: Any, recipe_file: str) -> None:
    recipe = runtime.recipe
    task = task_of(recipe.model.family)
    require_free_folder(runtime)
    resume_from = find_checkpoint(recipe.train.resume, runtime.dir)
    require_optimizer(recipe.optim, runtime.accelerator.device)
    require_quantization(recipe)
    require_hub(runtime)
    data = task.prepare_data(runtime, checkpoint)  # encoders live and die here

    dtype = runtime.precision.dtype
    model, groups, attached = task.load_trainable(recipe, family, checkpoint, dtype)
    runtime.say(attached)

    run = prepare(runtime, task, checkpoint, data, model, groups, resume_from)
    write_facts(run.setup)
    write_data_record(runtime, data)
    report = Reporting(runtime.dir, runtime.say, writes=runtime.is_main)
    try:
        with status_noted(runtime, recipe_file):
            fit(run, on_checkpoint=report.update)
            written = finish(run)
    except DitLoraError:
        report.finish()  # a run that was stopped has curves and events too
        raise
    page = report.finish()
    if written.path is not None:
        runtime.say(summary(runtime, written.path, written.verification, page))
    require_verified(runtime, written.verification)
    push_result(runtime)


if __name__ == "__main__":
    with reported_errors():
        main(sys.argv[1:])
