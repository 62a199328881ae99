"""Trains a prepared run: the training loop, and everything that happens between two steps."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NoReturn

from tqdm import tqdm

from dit_lora.data.loading.batch import Batch
from dit_lora.data.loading.reading import Reading
from dit_lora.data.loading.sampler import PositionSampler
from dit_lora.errors import DitLoraError, InterruptedRunError, unwritable
from dit_lora.guard.event import Event
from dit_lora.guard.gate import NonFiniteError, PoisonedStateError
from dit_lora.numerics.dtensors import needs_all_ranks
from dit_lora.training.base_output import check_kernels
from dit_lora.training.checkpoints.files import checkpoint_path, newest_checkpoint
from dit_lora.training.execution.base_alone import base_alone
from dit_lora.training.guarding.agreement import note_averages, require_agreement
from dit_lora.training.guarding.preflight import preflight
from dit_lora.training.guarding.setup import chosen_norms
from dit_lora.training.guarding.state_checks import (
    own_state,
    require_finite_everywhere,
    require_not_lost,
    require_unaltered,
)
from dit_lora.training.journal import IDLE, held_out_losses, metrics_line
from dit_lora.training.loop import Loop, train
from dit_lora.training.micro_batch import sample_losses
from dit_lora.training.optim.build import build_schedule
from dit_lora.training.run import Run
from dit_lora.training.session.session import agree, stop_signals
from dit_lora.training.step import StepResult


def fit(run: Run, on_checkpoint: Callable[[], None] = lambda: None) -> None:
    """Train to `train.steps` with metrics, checkpoints and validation; Ctrl-C saves and stops. Collective.

    `on_checkpoint` is called at the start, once the base has been validated, and after each step that is saved or
    validated.
    """
    setup = run.setup
    recipe, session, phases = setup.recipe, setup.session, setup.session.phases
    base_waits = _show_start(run)
    # Before the first step: a run that cannot train ends here.
    if recipe.guard.preflight:
        with phases.timing("preflight"):
            _tell(run, preflight(setup, run.recovery, run.parity))
    # Preflight's comparison is the first that passed: a kernel fault found later rolls back to this state.
    run.parity.start(compared=bool(recipe.guard.preflight))
    with phases.timing("whole model's kernels"):
        _tell(run, check_kernels(setup, run.base, run.recovery.state.switched_off))
    note_averages(run)
    with phases.timing("snapshot"):
        run.recovery.snapshots.take(run.start_step)
    on_checkpoint()
    intervals = [recipe.train.save_every, recipe.validation.every]
    bar = tqdm(
        total=recipe.train.steps,
        initial=run.start_step,
        desc="training",
        unit="step",
        disable=not session.is_main,
        dynamic_ncols=True,
    )
    with bar, stop_signals(session.launcher) as stop_asked:

        def on_step(result: StepResult) -> None:
            nonlocal base_waits
            if phases.first_step_taken() and session.is_main:
                phases.write(session.dir)
                session.say(f"first step after {phases.line('before')}")
            # The step is taken: what fails from here on must not lose it.
            with _kept_at(run, result.step):
                _average_and_note(run, bar, result)
            if base_waits and not result.stop_code:
                # The base is validated before anything is saved: failing samples end the run in its first minutes.
                base_waits = False
                validate(run, step=0)
                on_checkpoint()
            with _kept_at(run, result.step):
                _after_step(run, result)
            if any(interval and result.step % interval == 0 for interval in intervals):
                on_checkpoint()

        phases.begin_steps()
        with run.checkpoints.written_to_the_end():
            train(
                _loop(run, bar),
                lambda step: _batches(run, step),
                start_step=run.start_step,
                steps=recipe.train.steps,
                # A full disk or a lost lock on one rank stops all ranks as a signal does: they learn it in the step's
                # gather.
                stop_asked=lambda: max(stop_asked(), run.checkpoints.trouble()),
                on_step=on_step,
            )
    phases.end_steps()


def _tell(run: Run, events: Iterable[Event]) -> None:
    """Log the events from before the first step, and write them to events.jsonl."""
    for event in events:
        run.setup.session.say(f"guard: {event.words}")
        if run.journal is not None:
            run.journal.event(event)


def _show_start(run: Run) -> bool:
    """Validate the starting model, to compare the end with. Returns True if this must wait until after the first
    step.
    """
    if run.start_step == 0:
        if not run.base.begins_alone:
            validate(run, step=0)
        return run.base.begins_alone
    # A run that was stopped in its first step, before its base was validated.
    stopped = run.start_step == 1 and run.base.begins_alone
    if stopped and 0 not in held_out_losses(run.setup.session.dir):
        validate(run, step=0)
    if _was_not_measured(run):
        validate(run, step=run.start_step)
    return False


def _was_not_measured(run: Run) -> bool:
    """True if the run was stopped between a checkpoint and the validation of the same step."""
    recipe, step = run.setup.recipe, run.start_step
    interval = recipe.validation.every
    losses = held_out_losses(run.setup.session.dir)
    due = interval is not None and step % interval == 0 and step < recipe.train.steps
    return due and bool(losses) and step not in losses


def _loop(run: Run, bar: tqdm) -> Loop:
    setup, recipe = run.setup, run.setup.recipe
    # A function of group and step: it has no state to save.
    schedule = build_schedule(recipe.optim, recipe.train.steps)
    return Loop(
        engine=setup.engine,
        losses=sample_losses(setup.checkpoint),
        # Read at every step: a rollback may have lowered the rates.
        schedule=lambda group, step: schedule(group, step) * run.recovery.state.lr_scale,
        optim=recipe.optim,
        accumulate=recipe.train.accumulate,
        copies=recipe.train.context_parallel,
        seed=recipe.train.seed,
        recovery=run.recovery,
        watcher=run.watcher,
        norms=chosen_norms(setup),
        unreadable=lambda step, reason: _end_unread(run, step, reason),
        note=lambda result: _note(run, bar, result),
        at_once=lambda step: _read_at_once(run, step),
    )


def _read_at_once(run: Run, step: int) -> bool:
    """True if this step's metrics must be read before the next step is launched."""
    recipe = run.setup.recipe
    # The first step is reported as soon as it is taken. Validation and comparisons need the memory that the next
    # step's gradients would take.
    if step == run.start_step + 1:
        return True
    looks = (recipe.train.save_every, recipe.validation.every, recipe.guard.parity_every)
    due = any(interval and step % interval == 0 for interval in looks)
    return due or run.recovery.snapshots.due(step) or run.watcher.looks_at(step)


def _batches(run: Run, start_step: int) -> Iterable[Batch]:
    """This rank's micro-batches after `start_step`, in the order that the quarantine leaves."""
    session, recipe = run.setup.session, run.setup.recipe
    sampler = PositionSampler(
        start_step=start_step,
        steps=recipe.train.steps,
        batch_size=recipe.train.batch_size,
        accumulate=recipe.train.accumulate,
        rank=session.data_rank,
        ranks=session.data_ranks,
    )
    loader_config = Reading(
        sampler,
        seed=recipe.train.seed,
        caption_dropout=recipe.data.caption_dropout,
        quarantine=run.recovery.quarantine,
        workers=recipe.data.workers,
        prefetch=recipe.data.prefetch,
        pin_memory=session.accelerator.device.type == "cuda",
        draws=run.setup.checkpoint.draws,
    )
    return run.parity.noting(run.setup.data.clips.loader(loader_config), start_step)


def _after_step(run: Run, result: StepResult) -> None:
    setup, recovery, step = run.setup, run.recovery, result.step
    train, phases = setup.recipe.train, setup.session.phases
    if result.stop_code:
        # Raises what could not be written: it stopped the run as a signal does.
        run.checkpoints.settle()
    is_last, snapshots = step == train.steps, recovery.snapshots
    # Before anything is saved: if a kernel has gone wrong, these steps are taken again.
    with phases.timing("kernels compared"):
        run.parity.after_step(step, last=is_last)
    # A saved state must be sound, but a check reads all state: so check only when a state is saved.
    to_save = step % train.save_every == 0 or is_last or bool(result.stop_code)
    if to_save or snapshots.due(step):
        with phases.timing("state checked"):
            _require_sound(run, step, frozen=to_save)
    if to_save:
        with phases.timing("saving"):
            run.checkpoints.save(step, recovery.record(), wait=is_last or bool(result.stop_code))
    if snapshots.due(step):
        with phases.timing("snapshot"):
            snapshots.take(step)
    if result.stop_code:
        raise InterruptedRunError(
            f"after step {step}, as asked; it is saved: continue with train.resume=auto",
            result.stop_code,
        )
    interval = setup.recipe.validation.every
    if interval and step % interval == 0 and not is_last:
        validate(run, step=step)


def _require_sound(run: Run, step: int, *, frozen: bool) -> None:
    """Raise on every rank if the state is not sound enough to keep; `frozen` also checks the weights that do not
    train.
    """
    setup, suspects = run.setup, run.recovery.suspects
    accelerator = setup.session.accelerator
    # First: a rank that lost its weights by itself has no wrong learning rate.
    require_agreement(run, step)
    require_not_lost(setup.engine, suspects.start_peak, step)
    require_finite_everywhere(accelerator, own_state(setup.engine, run.ema), step)
    require_unaltered(accelerator, suspects, step, frozen=frozen)


def _average_and_note(run: Run, bar: tqdm, result: StepResult) -> None:
    if run.ema is not None:
        # Only healthy steps come here: the average never sees a failed step.
        run.ema.step(result.step)
    _note(run, bar, result)


def _note(run: Run, bar: tqdm, result: StepResult) -> None:
    """Write a step's metrics and module statistics, and report anything unusual. Not collective."""
    setup, step, watcher = run.setup, result.step, run.watcher
    modules, hidden = watcher.statistics(step), watcher.hidden_infinities(step)
    line = metrics_line(result, setup.task.loss_parts(setup, result))
    # On every rank: the adaptive clip depends on it.
    spikes = watcher.observe(line)
    if run.journal is None:
        return
    run.journal.step(line, modules)
    starving = run.journal.starving(line, setup.recipe.data.workers)
    if starving is not None:
        setup.session.say(f"warning: step {step}: {starving}")
    bar.set_postfix(loss=f"{result.loss:.4f}", grad=f"{result.grad_norm:.3g}", refresh=False)
    # After a rollback the bar goes back too.
    bar.update(step - bar.n)
    for spike in spikes:
        _report(run, step, "spike", spike.words)
    if hidden:
        # Values beyond the dtype's range, hidden from the loss by a clamp or a mask.
        # At most five names in the message.
        modules_text = ", ".join(hidden[:5]) + (
            f" and {len(hidden) - 5} more" if hidden[5:] else ""
        )
        message = f"the loss is finite, but the output of {modules_text} is not: something hides it"
        _report(run, step, "hidden_infinity", message, cause="precision", module=hidden[0])
    for name in run.journal.idle_groups(line):
        message = (
            f"the gradient of group {name} has been zero for {IDLE} steps, though others have one: nothing of it is "
            "trained (said once)"
        )
        _report(run, step, "zero_gradient_group", message)


def _report(
    run: Run, step: int, kind: str, words: str, cause: str = "unknown", **facts: str
) -> None:
    """Log an unusual but healthy step and write an event; no action is taken. Writes on the main process only."""
    diagnosis = {"cause": cause, "words": words, **facts}
    if run.journal is not None:
        run.journal.event(Event(step, kind, diagnosis))
    run.setup.session.say(f"guard: step {step}: {words}")


def validate(run: Run, step: int) -> None:
    """Measure the held-out loss and generate samples with the weights that would be saved. Collective.

    At step 0 the base is used. A failure is reported, and costs only the measurement or samples that are left out.
    """
    setup, phases, optional = run.setup, run.setup.session.phases, run.setup.session.optional
    of_base = step == 0 and run.base.begins_alone
    weights_context = base_alone(setup.transformer) if of_base else averaged(run)
    is_collective = needs_all_ranks(setup.model)
    with ExitStack() as stack:
        # Copies of weights may not fit either. A rank that fails must not leave the others waiting in a forward pass.
        if not optional.attempt("validations", step, lambda: _entered(stack, weights_context)):
            return
        with phases.timing("held-out loss"):
            loss = optional.attempt(
                "held-out losses",
                step,
                lambda: setup.task.held_out_loss(setup),
                is_collective=is_collective,
            )
        if run.journal is not None and loss is not None:
            # The report and best.json sort by the loss, and NaN has no order.
            if math.isfinite(loss):
                run.journal.held_out(step, loss)
                run.checkpoints.note_best(step)
            else:
                message = "the held-out loss is not finite; it is not recorded, and nothing is trained on it"
                _report(run, step, "non_finite_validation", message)
        with phases.timing("samples"):
            optional.attempt(
                "samples", step, lambda: setup.task.show(setup, step), is_collective=is_collective
            )
        setup.session.trackers.samples(step, setup.recipe.validation.sampled)


def _entered(stack: ExitStack, context: AbstractContextManager[None]) -> bool:
    stack.enter_context(context)
    return True


def averaged(run: Run) -> AbstractContextManager[None]:
    """Put the weights that are saved into the model inside the context: the averages, if the run keeps an EMA."""
    return run.ema.applied() if run.ema is not None else nullcontext()


@contextmanager
def _kept_at(run: Run, step: int) -> Iterator[None]:
    """Save `step` if a disk, file or process error is raised inside, and append the outcome to the error. Collective.

    On several ranks only errors that all ranks agreed on are handled: after any other, the launcher ends the other
    ranks.
    """
    is_single_process = run.setup.session.accelerator.num_processes == 1
    try:
        yield
    except (NonFiniteError, PoisonedStateError, InterruptedRunError):
        raise  # the code that raised these has saved what can be saved
    except DitLoraError as error:
        if not (error.collective or is_single_process):
            raise
        # Saving gathers over all ranks, so an error on only one rank must not lead there.
        raise _ended(run, step, error) from error
    except OSError as error:
        if not is_single_process:
            raise
        raise _ended(run, step, unwritable(error)) from error


def _end_unread(run: Run, step: int, why: str) -> NoReturn:
    """End the run after `step`, because some rank cannot read its data for the reason `why`. Collective."""
    accelerator = run.setup.session.accelerator
    with _kept_at(run, step):
        agree(accelerator, DitLoraError(f"step {step + 1}: {why}") if why else None)
    raise AssertionError("no rank says why")


def _ended(run: Run, step: int, error: DitLoraError) -> DitLoraError:
    ended = DitLoraError(f"{error}{_last_effort(run, step)}")
    # The same exit code, so that schedulers see the original failure.
    ended.exit_code, ended.collective = error.exit_code, True
    return ended


def _last_effort(run: Run, step: int) -> str:
    """Save a step after a failure, and describe the outcome. Collective."""
    session = run.setup.session
    # This process has taken no step: the state it started from is already on the disk.
    if step <= run.start_step:
        return ""
    # With a lost lock the writer, on the main process, must go on refusing.
    if session.lock.lost() is None:
        run.checkpoints.saver.forget()
    try:
        run.checkpoints.save(step, run.recovery.record(), wait=True)
    except DitLoraError:
        checkpoint = newest_checkpoint(session.dir) if session.is_main else None
        resort = (
            f"train.resume=auto goes on from {checkpoint}"
            if checkpoint
            else "there is no checkpoint"
        )
        return f"\nstep {step} cannot be saved either; {resort}"
    # Lines that the disk refused before: a resumed run does not repeat their steps.
    if run.journal is not None:
        run.journal.flush()
    checkpoint_folder = checkpoint_path(session.dir, step)
    return f"\nstep {step} is saved in {checkpoint_folder}: continue with train.resume=auto"
