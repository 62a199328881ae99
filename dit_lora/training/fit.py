"""Trains a prepared run: the training loop, and everything that happens between two steps."""

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from dit_lora.data.loading.batch import Batch, DataReadingSettings, PositionSampler
from dit_lora.environment.progress_bar import ProgressBar
from dit_lora.errors import DitLoraError, InterruptedRunError, make_write_error
from dit_lora.guard.diagnosis import Event, make_hidden_infinity_event, make_observation_event
from dit_lora.guard.finite_gate import BadStateError, NonFiniteError
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.dtensors import has_collective_forward
from dit_lora.numerics.ranks import broadcast_object
from dit_lora.training.base_fingerprint import switch_off_faulty_kernels
from dit_lora.training.check_budget import EvalSize
from dit_lora.training.checkpoints.files import checkpoint_path, find_newest_checkpoint
from dit_lora.training.early_stopping import find_best_step_if_stalled
from dit_lora.training.eval_losses import read_eval_losses
from dit_lora.training.execution.base_alone import temporarily_reset_adapters
from dit_lora.training.journal import MAX_IDLE_STEPS, build_metrics_line
from dit_lora.training.loop import LoopCallbacks, TrainingLoopComponents, train
from dit_lora.training.optim.build import LearningRateSchedule
from dit_lora.training.recovery.build import choose_gradient_norm_function
from dit_lora.training.recovery.gradient_watch import PeriodicGradientCheck
from dit_lora.training.recovery.preflight import preflight
from dit_lora.training.recovery.rank_consistency import record_sound_averages, require_ranks_agree
from dit_lora.training.recovery.state_checks import (
    collect_local_state,
    require_finite_everywhere,
    require_not_diverged,
    require_uncorrupted_state,
)
from dit_lora.training.replayable_batch import WeightedLoss
from dit_lora.training.run import Run
from dit_lora.training.session.session import handle_stop_signals, raise_on_all_ranks
from dit_lora.training.step import StepResult


def fit(run: Run, on_checkpoint: Callable[[], None] = lambda: None) -> None:
    """Train to `train.steps` with metrics, checkpoints and validation; Ctrl-C saves and stops. Collective.

    `on_checkpoint` is called at the start, once the base has been validated, and after each step that is saved or
    validated.
    """
    recipe, session, phases = run.recipe, run.session, run.session.phases
    base_waits = _validate_before_training(run)
    # A resumed run that had ended early trains no more, unless `train.stop_after` has changed.
    if _is_validation_due(run, run.start_step) and (best := _find_best_step_if_stalled(run)) is not None:
        _end_early(run, run.start_step, best)
    # Before the first step: a run that cannot train ends here.
    if recipe.guard.preflight:
        with phases.time_phase("preflight"):
            _report_events(run, preflight(run, run.recovery, run.parity))
    # Preflight's comparison is the first that passed: a kernel fault found later rolls back to this state.
    run.parity.start_periodic_comparisons(was_compared=bool(recipe.guard.preflight))
    with phases.time_phase("model parity"):
        _report_events(run, switch_off_faulty_kernels(run, run.base_fingerprint, run.recovery.state.switched_off))
    record_sound_averages(run)
    with phases.time_phase("snapshot"):
        run.recovery.snapshots.take_snapshot(run.start_step)
    on_checkpoint()
    steps = recipe.train.steps
    is_quiet = not session.is_main
    bar = ProgressBar(total=steps, initial=run.start_step, desc="training", unit="step", disable=is_quiet)
    with bar, handle_stop_signals(session.launcher) as get_signal_code:
        gradient_watch = PeriodicGradientCheck(run, run.recovery, run.start_step, run.ema)
        reason = gradient_watch.unsupported_reason or gradient_watch.skipped_reason
        if reason is not None:
            session.say(f"warning: {reason}")
        callbacks = RunCallbacks(run, bar, get_signal_code, on_checkpoint, base_waits, gradient_watch)
        phases.begin_first_step()
        with run.saved_checkpoints.finish_writes():
            train(_build_loop(run, callbacks), start_step=run.start_step, steps=run.last_step)
    # Also here: a run that was finished before has taken no step.
    phases.end_training_stage()


@dataclass
class RunCallbacks(LoopCallbacks):
    """What a run does around its steps: loading batches, logging, checkpoints and validation."""

    run: Run
    bar: ProgressBar
    get_signal_code: Callable[[], int]
    """Returns the exit code that a signal has asked for, or 0."""
    on_checkpoint: Callable[[], None]
    """Called after each step that is saved or validated."""
    base_waits: bool
    """True until the base has been validated, if this waits for the first step."""
    gradient_watch: PeriodicGradientCheck
    gradient_check_s: float = 0.0
    """Wall time of the last step's gradient check, which is inside of the step's time."""

    def load_batches(self, start_step: int) -> Iterable[Batch]:
        """This rank's micro-batches after `start_step`, in the order that the quarantine leaves."""
        run = self.run
        session = run.session
        recipe = run.recipe
        session.phases.resume_training_stage()
        self.gradient_watch.restart_after_step(start_step)
        sampler = PositionSampler(
            start_step=start_step,
            steps=recipe.train.steps,
            batch_size=recipe.train.batch_size,
            accumulate=recipe.train.accumulate,
            rank=session.data_rank,
            num_ranks=session.num_data_ranks,
        )
        loader_config = DataReadingSettings(
            sampler,
            seed=recipe.train.seed,
            caption_dropout=recipe.data.caption_dropout,
            quarantine=run.recovery.quarantine,
            workers=recipe.data.workers,
            prefetch=recipe.data.prefetch,
            pin_memory=session.accelerator.device.type == "cuda",
            get_draw_functions=run.checkpoint.get_random_input_samplers,
        )
        return run.parity.record_recent_batches(run.data.training_set.make_loader(loader_config), start_step)

    def get_stop_code(self) -> int:
        # A full disk or a lost lock on one rank stops all ranks as a signal does: by the step's gather.
        return max(self.get_signal_code(), self.run.saved_checkpoints.poll_exit_code())

    def should_sync_after(self, step: int) -> bool:
        return _should_sync_after(self.run, step)

    def on_gradients(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        losses: Sequence[torch.Tensor],
        previous_batch: MicroBatch | None,
    ) -> None:
        self.gradient_check_s = 0.0
        if self.gradient_watch.is_due(step):
            began = time.perf_counter()
            with self.run.session.phases.time_phase("gradient check"):
                self.gradient_watch.check_gradient_if_due(step, micro_batches, losses, previous_batch)
            self.gradient_check_s = time.perf_counter() - began

    def on_step(self, result: StepResult) -> None:
        run = self.run
        session = run.session
        recipe = run.recipe
        # A gradient check runs inside of the step, and is a phase of its own.
        step_s = result.seconds - self.gradient_check_s
        session.phases.add_step_time(step_s)
        run.sample_budget.step_s += step_s
        if session.phases.end_first_step() and session.is_main:
            session.phases.write_phase_times(session.dir)
            slow_start = session.phases.describe_slow_start()
            if slow_start is not None:
                session.say(f"first step after {slow_start}")
        # The step is taken: what fails from here on must not lose it.
        with _save_on_error(run, result.step):
            # Only healthy steps come here: the average never sees a failed step.
            if run.ema is not None:
                run.ema.step(result.step)
            _log_step(run, self.bar, result)
        if result.step == recipe.train.steps:
            # Here and not when the loop returns: the last checks and the last checkpoint come after the last step.
            session.phases.end_training_stage()
        if self.base_waits and not result.stop_code:
            # The base is validated before anything is saved: failing samples end the run in its first minutes.
            self.base_waits = False
            validate(run, step=0)
            self.on_checkpoint()
        with _save_on_error(run, result.step):
            _check_and_save(run, result)
        if any(
            interval and result.step % interval == 0 for interval in (recipe.train.save_every, recipe.validation.every)
        ):
            self.on_checkpoint()

    def should_end_after(self, step: int) -> bool:
        return self.run.early_stop.step == step

    def log_step(self, result: StepResult) -> None:
        _log_step(self.run, self.bar, result)

    def end_unreadable_run(self, step: int, reason: str) -> NoReturn:
        accelerator = self.run.accelerator
        with _save_on_error(self.run, step):
            raise_on_all_ranks(accelerator, DitLoraError(f"step {step + 1}: {reason}") if reason else None)
        raise AssertionError("no rank says why")


def _report_events(run: Run, events: Iterable[Event]) -> None:
    for event in events:
        run.session.say(f"guard: {event.message}")
        if run.journal is not None:
            run.journal.write_event(event)


def _validate_before_training(run: Run) -> bool:
    """Evaluate the starting model, so that the trained one can be compared with it.

    Returns True if this must wait for the first step.
    """
    step = run.start_step
    if step == 0:
        if not run.base_fingerprint.has_idle_adapter:
            validate(run, step=0)
        return run.base_fingerprint.has_idle_adapter
    # A run that was stopped in its first step, before its base was validated.
    stopped = step == 1 and run.base_fingerprint.has_idle_adapter
    if stopped and 0 not in read_eval_losses(run.session.dir):
        validate(run, step=0)
    # A run that was stopped between a checkpoint and the validation of the same step.
    losses = read_eval_losses(run.session.dir)
    if _is_validation_due(run, step) and losses and step not in losses:
        validate(run, step=step)
    return False


def _is_validation_due(run: Run, step: int) -> bool:
    """True if `validation.every` is due at this step, and the step is neither the first nor the last."""
    interval, steps = run.recipe.validation.every, run.recipe.train.steps
    return interval is not None and step % interval == 0 and 0 < step < steps


def _build_loop(run: Run, callbacks: RunCallbacks) -> TrainingLoopComponents:
    recipe = run.recipe
    return TrainingLoopComponents(
        engine=run.engine,
        loss_function=WeightedLoss(run.checkpoint),
        schedule=LearningRateSchedule(recipe.optim, recipe.train.steps),
        optim=recipe.optim,
        accumulate=recipe.train.accumulate,
        ranks_per_sample=recipe.train.context_parallel,
        seed=recipe.train.seed,
        recovery=run.recovery,
        watcher=run.watcher,
        callbacks=callbacks,
        compute_norms=choose_gradient_norm_function(run),
    )


def _should_sync_after(run: Run, step: int) -> bool:
    """True if this step's metrics must be read before the next step is launched."""
    recipe = run.recipe
    # The first step is reported as soon as it is taken. Validation and comparisons need the memory that the next
    # step's gradients would take.
    if step == run.start_step + 1:
        return True
    looks = (recipe.train.save_every, recipe.validation.every, recipe.guard.parity_every)
    due = any(interval and step % interval == 0 for interval in looks)
    return due or run.recovery.snapshots.is_snapshot_due(step) or run.watcher.has_statistics(step)


def _check_and_save(run: Run, result: StepResult) -> None:
    recovery, step = run.recovery, result.step
    train, phases = run.recipe.train, run.session.phases
    if result.stop_code:
        # Raises what could not be written: it stopped the run as a signal does.
        run.saved_checkpoints.wait_for_writes()
    is_last, snapshots = step == train.steps, recovery.snapshots
    # Before anything is saved: if a kernel has gone wrong, these steps are taken again.
    with phases.time_phase("kernel parity"):
        run.parity.compare_kernels_if_due(step, is_last=is_last)
    # A saved state must be sound, but a check reads all state: so check only when a state is saved.
    to_save = step % train.save_every == 0 or is_last or bool(result.stop_code)
    if to_save or snapshots.is_snapshot_due(step):
        with phases.time_phase("state check"):
            _require_sound_state(run, step, check_frozen=to_save)
    if to_save:
        with phases.time_phase("saving"):
            run.saved_checkpoints.save(step, recovery.state_dict(), wait=is_last or bool(result.stop_code))
    if snapshots.is_snapshot_due(step):
        with phases.time_phase("snapshot"):
            snapshots.take_snapshot(step)
    if result.stop_code:
        raise InterruptedRunError(f"step {step} is saved; to continue, add train.resume=auto", result.stop_code)
    if _is_validation_due(run, step):
        validate(run, step=step)
        if (best := _find_best_step_if_stalled(run)) is not None:
            _save_last_step(run, step)
            _end_early(run, step, best)


def _find_best_step_if_stalled(run: Run) -> int | None:
    """The best step so far if `train.stop_after` ends the run now; None if it goes on. Collective."""
    recipe, best = run.recipe, None
    if recipe.train.stop_after is None:
        return None
    if run.journal is not None:
        # The losses and not a counter, so that a resumed run counts on, and a rollback counts back.
        best = find_best_step_if_stalled(
            run.journal.get_eval_losses(recipe.validation.ranking_loss), recipe.train.stop_after
        )
    return broadcast_object(best)


def _save_last_step(run: Run, step: int) -> None:
    """Check and save a step as if it were the recipe's last, after a validation has shown that it is. Collective."""
    phases = run.session.phases
    with phases.time_phase("kernel parity"):
        run.parity.compare_kernels_if_due(step, is_last=True)
    # Otherwise it was checked and saved before its validation.
    if step % run.recipe.train.save_every:
        with phases.time_phase("state check"):
            _require_sound_state(run, step, check_frozen=True)
        with phases.time_phase("saving"):
            run.saved_checkpoints.save(step, run.recovery.state_dict(), wait=True)


def _end_early(run: Run, step: int, best: int) -> None:
    """Let training end after `step`, and say why, here and in the closing summary. Collective."""
    run.early_stop.step = step
    # Until then older checkpoints may still be deleted.
    run.saved_checkpoints.wait_for_writes()
    if run.journal is None:
        return
    folder, name = run.session.dir, run.recipe.validation.ranking_loss
    losses = run.journal.get_eval_losses(name)
    num_later = sum(measured > best for measured in losses)
    line = (
        f"stopped early after step {step}: no lower {_format_loss_name(name)} in {num_later} validation"
        f"{'s' if num_later > 1 else ''}; the best was {losses[best]:.4f} at step {best}"
    )
    if checkpoint_path(folder, best).is_dir():
        line += f", saved in {checkpoint_path(folder, best)}"
    elif best:
        line += ", whose checkpoint was not kept (train.keep_best keeps it)"
    run.session.say(line)
    run.session.closing_lines.append(line)


def _require_sound_state(run: Run, step: int, *, check_frozen: bool) -> None:
    """Raise on every rank if weights or optimizer state are not sound enough to keep.

    `check_frozen` also checks frozen weights.
    """
    context = run.recovery.diagnosis_context
    # First: a rank that lost its weights by itself has no wrong learning rate.
    require_ranks_agree(run, step)
    require_not_diverged(run.engine, context.start_peak, step)
    require_finite_everywhere(collect_local_state(run.engine, run.ema), step)
    require_uncorrupted_state(context, step, check_frozen=check_frozen)


def _log_step(run: Run, bar: ProgressBar, result: StepResult) -> None:
    """Write a step's metrics and module statistics, and report anything unusual. Not collective."""
    step, watcher = result.step, run.watcher
    modules, hidden = watcher.collect_statistics(step), watcher.find_hidden_infinities(step)
    line = build_metrics_line(result, run.task.loss_parts(run, result))
    # On every rank: the adaptive clip depends on it.
    spikes = watcher.find_metric_spikes(line)
    if run.journal is None:
        return
    run.journal.write_step(line, modules)
    starving = run.journal.check_dataloader_bottleneck(line, run.recipe.data.workers)
    if starving is not None:
        run.session.say(f"warning: step {step}: {starving}")
    bar.set_postfix(loss=f"{result.loss:.4f}", grad=f"{result.grad_norm:.3g}", refresh=False)
    # After a rollback the bar goes back too.
    bar.update(step - bar.n)
    for spike in spikes:
        _report_anomaly(run, make_observation_event(step, "spike", spike.message))
    if hidden:
        _report_anomaly(run, make_hidden_infinity_event(step, hidden))
    for name in run.journal.find_idle_groups(line):
        message = (
            f"the gradient of group {name} has been zero for {MAX_IDLE_STEPS} steps, while other groups have "
            "one: it is not trained (shown once)"
        )
        _report_anomaly(run, make_observation_event(step, "zero_gradient_group", message))


def _report_anomaly(run: Run, event: Event) -> None:
    """Log an unusual but healthy step and write its event. Writes on the main process only."""
    if run.journal is not None:
        run.journal.write_event(event)
    run.session.say(f"guard: step {event.step}: {event.message}")


def validate(run: Run, step: int) -> None:
    """Measure the eval loss and generate samples with the weights that would be saved. Collective.

    Samples between the first and the last step are left out where they would exceed `validation.max_sample_share`.
    At step 0 the base is used. A failure is reported, and only the failed measurement or samples are skipped.
    """
    phases, optional = run.session.phases, run.session.optional_work
    of_base = step == 0 and run.base_fingerprint.has_idle_adapter
    weights_context = temporarily_reset_adapters(run.transformer) if of_base else use_averaged_weights(run)
    is_collective = has_collective_forward(run.model)
    with ExitStack() as stack:
        # Copies of weights may not fit either. A rank that fails must not leave the others waiting in a forward pass.
        if not optional.run_optional_work("validations", step, lambda: _enter_stack_context(stack, weights_context)):
            return
        losses: dict[str, float | None] = {}
        with phases.time_phase("eval loss"):
            measure = partial(_measure_eval_loss, run)
            result = optional.run_optional_work("eval losses", step, measure, is_collective=is_collective)
            reduced_size, losses["eval_loss"] = result or (None, None)
            measure_held_out = partial(run.task.compute_validation_loss, run)
            losses["validation_loss"] = optional.run_optional_work(
                "validation losses", step, measure_held_out, is_collective=is_collective
            )
        if reduced_size is not None:
            num_clips, num_draws = reduced_size
            full_draws = run.recipe.validation.eval_draws
            phases.reductions["eval loss"] = (
                f"{num_clips} clips, {num_draws} of {full_draws} noise draws each; in full with "
                f"validation.eval_draws={full_draws}"
            )
        finite_losses = {name: loss for name, loss in losses.items() if loss is not None}
        _record_eval_losses(run, step, finite_losses, reduced_size)
        is_between = step not in (0, run.recipe.train.steps)
        if not is_between or _can_afford_samples(run, step):
            _write_validation_samples(run, step, is_between=is_between)


def write_missing_samples(run: Run, step: int) -> None:
    """Generate the samples of the run's last step if they were left out when it was validated. Collective."""
    if run.recipe.validation.max_sample_share is None:
        return
    # A resumed run knows it only from the files, which the main process reads.
    if broadcast_object(run.session.is_main and not _get_samples_folder(run, step).exists()):
        with use_averaged_weights(run):
            _write_validation_samples(run, step, is_between=False)


def _can_afford_samples(run: Run, step: int) -> bool:
    """True if samples of a step between the first and the last fit `validation.max_sample_share`. Collective."""
    budget, session = run.sample_budget, run.session
    if budget.max_share is None or not run.recipe.validation.prompts:
        return True
    # The main process generates them, and its clock decides for all.
    if broadcast_object(budget.is_affordable()):
        return True
    if not budget.skipped_steps:
        session.say(f"step {step}: no samples, to keep within validation.max_sample_share")
    budget.record_step_without_samples(step)
    if session.is_main:
        # Those of a step that a rollback has discarded.
        shutil.rmtree(_get_samples_folder(run, step), ignore_errors=True)
    return False


def _get_samples_folder(run: Run, step: int) -> Path:
    return run.session.dir / "samples" / f"step_{step:06d}"


def _write_validation_samples(run: Run, step: int, *, is_between: bool) -> None:
    """Generate samples with the weights in the model; a failure is reported, and they are left out. Collective."""
    began = time.perf_counter()
    with run.session.phases.time_phase("samples"):
        write = partial(run.task.write_samples, run, step)
        run.session.optional_work.run_optional_work(
            "samples", step, write, is_collective=has_collective_forward(run.model)
        )
    run.sample_budget.add_sampling_time(step, time.perf_counter() - began, is_between=is_between)
    run.session.trackers.log_samples(step, run.recipe.validation.sample_titles)


def _measure_eval_loss(run: Run) -> tuple[EvalSize | None, float | None]:
    """The eval loss, and its size if the run is too short for the recipe's. Collective."""
    return run.task.find_reduced_eval_size(run), run.task.compute_eval_loss(run)


def _record_eval_losses(run: Run, step: int, losses: Mapping[str, float], size: EvalSize | None) -> None:
    """Write, report and rank the losses of a validation. Writes on the main process only."""
    if run.journal is None:
        return
    # The report and best.json sort by the losses, and NaN has no order.
    finite = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    for name in (name for name in losses if name not in finite):
        message = f"the {_format_loss_name(name)} is not finite, so it is not recorded; training is not affected"
        _report_anomaly(run, make_observation_event(step, "non_finite_validation", message))
    if not finite:
        return
    run.journal.write_eval_losses(step, finite, size)
    texts = []
    for name, loss in finite.items():
        first_loss = run.journal.get_base_loss(name)
        change = f" ({100 * (loss / first_loss - 1):+.1f}% since step 0)" if step and first_loss else ""
        texts.append(f"{_format_loss_name(name)} {loss:.4f}{change}")
    run.session.say(f"step {step}: {', '.join(texts)}")
    run.saved_checkpoints.update_best_checkpoint(step)


def _format_loss_name(name: str) -> str:
    return name.replace("_", " ")


def _enter_stack_context(stack: ExitStack, context: AbstractContextManager[None]) -> bool:
    stack.enter_context(context)
    return True


def use_averaged_weights(run: Run) -> AbstractContextManager[None]:
    """Put the weights that are saved into the model inside the context: the averages, if the run keeps an EMA."""
    return run.ema.apply_averages() if run.ema is not None else nullcontext()


@contextmanager
def _save_on_error(run: Run, step: int) -> Iterator[None]:
    """Save `step` if a disk, file or process error is raised inside, and add the outcome to its message. Collective.

    On several ranks only errors that all agreed on are handled: after any other, the launcher ends the other ranks.
    """
    is_single_process = run.accelerator.num_processes == 1
    try:
        yield
    except (NonFiniteError, BadStateError, InterruptedRunError):
        raise  # the code that raised these has saved what can be saved
    except DitLoraError as error:
        if not (error.collective or is_single_process):
            raise
        # Saving gathers over all ranks, so an error on only one rank must not lead there.
        raise _make_final_error(run, step, error) from error
    except OSError as error:
        if not is_single_process:
            raise
        raise _make_final_error(run, step, make_write_error(error)) from error


def _make_final_error(run: Run, step: int, error: DitLoraError) -> DitLoraError:
    ended = DitLoraError(f"{error}{_save_after_failure(run, step)}")
    # The same exit code, so that schedulers see the original failure.
    ended.exit_code, ended.collective = error.exit_code, True
    return ended


def _save_after_failure(run: Run, step: int) -> str:
    """Save a step after a failure, and describe the outcome. Collective."""
    session = run.session
    # This process has taken no step: the state it started from is already on the disk.
    if step <= run.start_step:
        return ""
    # With a lost lock the writer, on the main process, must go on refusing.
    if session.lock.get_run_folder_takeover_error() is None:
        run.saved_checkpoints.writer.clear_error()
    try:
        run.saved_checkpoints.save(step, run.recovery.state_dict(), wait=True)
    except DitLoraError:
        checkpoint = find_newest_checkpoint(session.dir) if session.is_main else None
        resort = f"train.resume=auto continues from {checkpoint}" if checkpoint else "there is no checkpoint"
        return f"\nstep {step} cannot be saved either; {resort}"
    # Lines that the disk refused before: a resumed run does not repeat their steps.
    if run.journal is not None:
        run.journal.flush_unwritten_lines()
    return f"\nstep {step} is saved in {checkpoint_path(session.dir, step)}; to continue, add train.resume=auto"
