"""Fine-tuning of a diffusion transformer or a chat model: one script, the recipe's YAML says which.

accelerate launch recipes/lora.py recipes/cogvideox/5b_t2v.yaml data.path=clips run.dir=runs/kitten
"""

import atexit
import gc
import signal
import sys
from pathlib import Path
from typing import Any

# Ctrl-C during the imports ends the process, without a traceback of an import.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
# Imports leave millions of objects that live as long as the process: no collection needs to scan them.
gc.disable()

from dit_lora.config.experts import split_recipe_by_expert
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError, InterruptedRunError, report_errors_and_exit
from dit_lora.families import get_family
from dit_lora.hub.after_training import push_result, require_hub_access
from dit_lora.numerics.ranks import broadcast_object
from dit_lora.report.run.background import BackgroundReporter
from dit_lora.training.checkpoints.files import checkpoint_path, describe_similar_run, find_checkpoint
from dit_lora.training.experts import combine_expert_adapters, is_run_finished, require_new_expert_folders
from dit_lora.training.finish import finish, format_next_commands, require_verified, summary
from dit_lora.training.finished import find_finished_step, is_finished
from dit_lora.training.fit import fit
from dit_lora.training.optim.build import require_optimizer
from dit_lora.training.prepare import prepare
from dit_lora.training.session.session import Session, make_interrupt_handler, require_free_folder, start_run_session
from dit_lora.training.status import record_run_status, write_data_record
from dit_lora.training.tasks.diffusion.model import require_quantization
from dit_lora.training.tasks.facts import write_facts
from dit_lora.training.tasks.registry import get_task_of_family

gc.freeze()
gc.enable()
if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, make_interrupt_handler())
atexit.register(gc.unfreeze)  # otherwise extensions report the remaining objects as leaks

USAGE = "accelerate launch recipes/lora.py RECIPE.yaml [key.path=value ...]"


def main(argv: list[str]) -> None:
    if argv[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{__doc__}\nusage: {USAGE}\n")
        return
    if not argv:
        raise DitLoraError(f"usage: {USAGE}")
    recipe = load_recipe(argv[0], argv[1:])
    try:
        train_in_turn(recipe, argv[0])
    except KeyboardInterrupt as interrupt:
        if is_finished(recipe):
            raise InterruptedRunError(f"the run in {recipe.run.dir} is finished", 130) from interrupt
        raise


def train_in_turn(recipe: Recipe, recipe_file: str) -> None:
    family = get_family(recipe.model.family)
    # Both experts of a checkpoint are two runs: open both before the first one starts, so that it fails early.
    turns = split_recipe_by_expert(recipe)
    checkpoints = [family.open(turn.model, turn) for turn in turns]
    require_new_expert_folders(turns)
    warning = describe_similar_run(recipe.train.resume, Path(recipe.run.dir))
    # The earlier session is passed on, so that both runs share one process group.
    before = None
    for turn, checkpoint in zip(turns, checkpoints, strict=True):
        is_last = turn is turns[-1]
        if not is_last and is_run_finished(turn):
            continue
        with start_run_session(turn, after=before, last=is_last) as session:
            if before is None:
                require_hub_access(session, recipe.hub)
                if warning:
                    session.say(f"warning: {warning}")
            is_one_of_both = turn is not recipe
            train(session, family, checkpoint, recipe_file, is_one_of_both=is_one_of_both)
            if is_last:
                if is_one_of_both:
                    combine_expert_adapters(session, recipe)
                push_result(session, recipe)
                session.say(format_next_commands(recipe))
        before = session


def train(session: Session, family: Any, checkpoint: Any, recipe_file: str, *, is_one_of_both: bool) -> None:
    recipe = session.recipe
    task = get_task_of_family(recipe.model.family)
    require_free_folder(session)
    resume_from = find_checkpoint(recipe.train.resume, session.dir)
    require_optimizer(recipe.optim, session.accelerator.device)
    require_quantization(recipe)
    with session.phases.time_phase("encoding"):
        data = task.prepare_data(session, checkpoint)  # encoders are loaded and freed inside

    dtype = session.precision.dtype
    with session.phases.time_phase("loading"):
        model, groups, attached = task.load_trainable(recipe, family, checkpoint, dtype)
    for line in attached.splitlines():
        session.say_once(line)

    # Before the log is cut to the step that is resumed: an earlier step of a longer run is not its end.
    finished_step = broadcast_object(find_finished_step(recipe) if session.is_main else None)
    has_finished = finished_step is not None and resume_from == checkpoint_path(session.dir, finished_step)
    run = prepare(session, task, checkpoint, data, model, groups, resume_from, has_finished=has_finished)
    # Of a finished run too: `push` says to resume a run whose facts are missing or damaged.
    write_facts(run)
    write_data_record(session, data)
    if finished_step == run.start_step:
        session.say(f"the run in {session.dir} is finished: step {run.start_step} was its last")
        return
    report = BackgroundReporter(session.dir, session.say, writes=session.is_main)
    try:
        with record_run_status(session, recipe_file):
            fit(run, on_checkpoint=report.update)
            written = finish(run)
    except DitLoraError:
        report.finish()  # a stopped run has curves and events too
        raise
    if session.is_main:
        session.phases.write_phase_times(session.dir)  # the report reads this file
    with session.phases.time_phase("report"):
        report.finish()
    if written.path is not None:
        session.say(summary(session, written.path, written.verification, is_one_of_both=is_one_of_both))
        session.say(session.phases.describe_time())
    require_verified(session, written.verification)


if __name__ == "__main__":
    try:
        with report_errors_and_exit("interrupted; to continue from the last checkpoint, add train.resume=auto"):
            main(sys.argv[1:])
    finally:
        # While Python ends, Ctrl-C could only show a traceback of some exit handler.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
