"""One run from a prepared model to a saved adapter: resume, train with its hooks, finish."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from tqdm import tqdm

import dit_lora
from dit_lora.compat import probe_environment
from dit_lora.config import Recipe
from dit_lora.data.loader import Batch, PositionSampler
from dit_lora.data.training_set import Reading
from dit_lora.errors import DitLoraError, InterruptedRunError
from dit_lora.redact import redacted
from dit_lora.remedies import HUB
from dit_lora.training.agreement import AverageBounds, note_averages, require_agreement
from dit_lora.training.base_output import BaseOutput, check_kernels, keep_base, note_base
from dit_lora.training.best import note_best
from dit_lora.training.compiled import compile_blocks
from dit_lora.training.context import share_context
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.engine import Engine, build_engine
from dit_lora.training.guarding import (
    build_guard,
    chosen_norms,
    own_state,
    prime_spikes,
    require_finite_everywhere,
    require_not_lost,
    require_unaltered,
)
from dit_lora.training.identity import run_identity
from dit_lora.training.journal import Journal, held_out_losses, metrics_line
from dit_lora.training.keeping import (
    end_unread,
    kept_at,
    require_own,
    resume,
    save,
    saved_to_the_end,
    settle,
    trouble,
)
from dit_lora.training.loop import Loop, StepResult, train
from dit_lora.training.memory import choose_checkpointing
from dit_lora.training.observed import (
    held_out_event,
    hidden_events,
    idle_group_events,
    spike_events,
)
from dit_lora.training.offload import offload_base
from dit_lora.training.optimizer import build_optimizer, build_schedule
from dit_lora.training.parity_watch import ParityWatch
from dit_lora.training.preflight import preflight
from dit_lora.training.recovery import RunRecovery
from dit_lora.training.replay import sample_losses
from dit_lora.training.runtime import Runtime, agree, open_run_folder, stop_signals
from dit_lora.training.saving import Saver
from dit_lora.training.task import Prepared, Task, Trained, task_of
from dit_lora.training.told import told_to_trackers
from dit_lora.training.verify import Verification, noted_output, verify_result
from dit_lora.training.watch import StepWatcher


@dataclass
class Run:
    """Everything that a started run holds."""

    runtime: Runtime
    family: Any
    checkpoint: Trained
    data: Prepared
    engine: Engine
    start_step: int
    journal: Journal | None
    """On the main process alone."""
    saver: Saver = field(init=False, default_factory=Saver)
    ema: TrainedEMA | None = field(init=False, default=None)
    bounds: AverageBounds = field(init=False, default_factory=AverageBounds)
    verification: Verification | None = field(init=False, default=None)
    """Of the result, once it is written; on the main process alone."""
    base: BaseOutput = field(init=False)
    guard: RunRecovery = field(init=False)
    watcher: StepWatcher = field(init=False)
    parity: ParityWatch = field(init=False)

    @property
    def recipe(self) -> Recipe:
        return self.runtime.recipe

    @property
    def model(self) -> nn.Module:
        """What a training forward goes through."""
        return self.engine.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    @property
    def transformer(self) -> nn.Module:
        return self.engine.bare

    @cached_property
    def task(self) -> Task:
        return task_of(self.recipe.model.family)

    @property
    def identity(self) -> dict[str, Any]:
        return run_identity(self)


def prepare(
    runtime: Runtime,
    family: Any,
    checkpoint: Trained,
    data: Prepared,
    transformer: nn.Module,
    groups: list[dict[str, Any]],
    resume_from: Path | None,
) -> Run:
    """Optimizer, device placement and DDP, and the state of `resume_from` if given."""
    recipe = runtime.recipe
    share_context(runtime, checkpoint, data, transformer)
    offload_base(recipe, transformer, runtime.accelerator)
    compile_blocks(recipe, transformer, runtime.accelerator)
    engine = build_engine(runtime, transformer, build_optimizer(groups, recipe.optim))
    run = Run(runtime, family, checkpoint, data, engine, start_step=0, journal=None)
    if recipe.train.ema is not None:
        run.ema = TrainedEMA(run.transformer, recipe.train.ema)
    if resume_from is not None:
        require_own(run, resume_from)  # another recipe's base is another too
    run.base = note_base(run, resume_from)
    changed: dict[str, Any] = {}
    if resume_from is not None:
        changed = resume(run, resume_from)
    elif recipe.train.resume == "auto":
        runtime.say(f"no checkpoint in {runtime.dir} yet: starting at step 0")
    if run.start_step > recipe.train.steps:
        raise DitLoraError(
            f"train.steps is {recipe.train.steps}, and {resume_from} is beyond it; raise train.steps or "
            "resume an earlier checkpoint"
        )
    run.guard, run.watcher = build_guard(run, changed, lambda step: save(run, step, wait=True))
    run.parity = ParityWatch(run, passed=changed.get("parity", {}).get("passed"))
    choose_checkpointing(run)
    open_run_folder(runtime)
    keep_base(run)
    if runtime.is_main and run.guard.quarantine.records:
        run.guard.quarantine.save()
    if runtime.is_main:
        runtime.trackers.start(told_to_trackers(runtime), run.start_step)
        run.journal = Journal(
            runtime.dir,
            start_step=run.start_step,
            trackers=runtime.trackers,
            say=runtime.say,
            fail=run.saver.fail,
        )
        run.journal.rejected(run.data.rejected, run.start_step)
    prime_spikes(run)
    for group in groups:
        count = sum(p.numel() for p in group["params"])
        runtime.say(f"group {group['name']}: {count:,} parameters, learning rate {group['lr']:g}")
    return run


def fit(run: Run, on_checkpoint: Callable[[], None] = lambda: None) -> None:
    """Train to `train.steps` with metrics, checkpoints and validation; Ctrl-C saves and stops.

    `on_checkpoint` is called at the start, and after each step that is saved or validated.
    """
    recipe, runtime = run.recipe, run.runtime
    if run.start_step == 0 or _was_not_measured(run):
        validate(run, step=run.start_step)
    if recipe.guard.preflight:
        _tell(run, preflight(run))
    run.parity.start(compared=recipe.guard.preflight)
    _tell(run, check_kernels(run))
    note_averages(run)
    run.guard.snapshots.take(run.start_step)
    on_checkpoint()
    shown = [recipe.train.save_every, recipe.validation.every]
    bar = tqdm(
        total=recipe.train.steps,
        initial=run.start_step,
        desc="training",
        unit="step",
        disable=not runtime.is_main,
        dynamic_ncols=True,
    )
    with bar, stop_signals(runtime.launcher) as stop_asked:

        def on_step(result: StepResult) -> None:
            with kept_at(run, result.step):
                _after_step(run, bar, result)
            if any(every and result.step % every == 0 for every in shown):
                on_checkpoint()

        with saved_to_the_end(run):
            train(
                _loop(run),
                lambda step: _batches(run, step),
                start_step=run.start_step,
                steps=recipe.train.steps,
                stop_asked=lambda: max(stop_asked(), trouble(run)),
                on_step=on_step,
            )


def _tell(run: Run, events: Iterable[dict[str, Any]]) -> None:
    """Say and write down what was found before the first step."""
    for event in events:
        run.runtime.say(f"guard: {event['verdict']['words']}")
        if run.journal is not None:
            run.journal.event(event)


def _was_not_measured(run: Run) -> bool:
    """Whether the run was stopped between a checkpoint and the held-out loss of its step."""
    every, step = run.recipe.validation.every, run.start_step
    losses = held_out_losses(run.runtime.dir)
    due = every is not None and step % every == 0 and step < run.recipe.train.steps
    return due and bool(losses) and step not in losses


def finish(run: Run) -> Path | None:
    """Save the adapter or whole pipeline, checked, verify the file, then validate; its path on the main process."""
    runtime, steps = run.runtime, run.recipe.train.steps
    error, path = None, None
    with averaged(run):
        weights = run.engine.weights()  # collective where they are sharded
        output = noted_output(run)
        try:
            if runtime.is_main:
                made = {**provenance(run), "output": output}
                path = run.task.save(run, made, weights)
                run.verification = verify_result(run, path, made, weights)
        except (OSError, SafetensorError) as problem:
            error = DitLoraError(
                f"cannot write the result to {runtime.dir}: {problem}; the checkpoint "
                f"of step {steps} is whole: free space and run again with train.resume=auto"
            )
        except DitLoraError as problem:
            error = problem
    agree(runtime.accelerator, error)
    # After the adapter is safe: sampling takes the most memory and time of all.
    validate(run, step=steps)
    settle(run)
    return path


def provenance(run: Run) -> dict[str, Any]:
    """What the adapter's header says of its making; a local checkpoint is named without its folders."""
    recipe, path = run.recipe, Path(run.recipe.model.path).expanduser()
    made = {
        "version": dit_lora.__version__,
        "family": recipe.model.family,
        "base_model": path.resolve().name if path.is_dir() else recipe.model.path.removeprefix(HUB),
        "revision": recipe.model.revision,
        "transformer_digest": run.data.transformer_digest,
        **_lora_facts(recipe),
        **{key: getattr(recipe.train, key) for key in ("steps", "ema", "seed")},
        "dtype": str(run.runtime.precision.dtype),
        "quantize": recipe.model.quantize,
        **run.task.provenance(run),
        "packages": dict(probe_environment().versions),
    }
    return dict(redacted(made))


def _lora_facts(recipe: Recipe) -> dict[str, Any]:
    if recipe.train.mode == "full":
        return {"mode": "full"}
    lora = recipe.lora
    return {"rank": lora.rank, "alpha": lora.alpha or lora.rank, "dropout": lora.dropout}


def _loop(run: Run) -> Loop:
    recipe = run.recipe
    schedule = build_schedule(recipe.optim, recipe.train.steps)
    run.engine.norms = chosen_norms(run)
    return Loop(
        engine=run.engine,
        losses=sample_losses(run.checkpoint),
        schedule=lambda group, step: schedule(group, step) * run.guard.state.lr_scale,
        optim=recipe.optim,
        accumulate=recipe.train.accumulate,
        copies=recipe.train.context_parallel,
        seed=recipe.train.seed,
        recovery=run.guard,
        watcher=run.watcher,
        unreadable=lambda step, why: end_unread(run, step, why),
    )


def _batches(run: Run, start_step: int) -> Iterable[Batch]:
    """The micro-batches of this rank after a step, in the order that the quarantine leaves."""
    recipe, accelerator = run.recipe, run.runtime.accelerator
    sampler = PositionSampler(
        start_step=start_step,
        steps=recipe.train.steps,
        batch_size=recipe.train.batch_size,
        accumulate=recipe.train.accumulate,
        rank=run.runtime.data_rank,
        ranks=run.runtime.data_ranks,
    )
    how = Reading(
        sampler,
        seed=recipe.train.seed,
        caption_dropout=recipe.data.caption_dropout,
        quarantine=run.guard.quarantine,
        workers=recipe.data.workers,
        prefetch=recipe.data.prefetch,
        pin_memory=accelerator.device.type == "cuda",
    )
    return run.parity.noting(run.data.clips.loader(how), start_step)


def _after_step(run: Run, bar: tqdm, result: StepResult) -> None:
    recipe, step = run.recipe, result.step
    if run.ema is not None:
        run.ema.step(step)
    _note(run, bar, result)
    if result.stop_code:
        settle(run)  # what could not be written stops the run as a signal does
    last, snapshots = step == recipe.train.steps, run.guard.snapshots
    run.parity.after_step(step, last=last)
    to_save = step % recipe.train.save_every == 0 or last or bool(result.stop_code)
    if to_save or snapshots.due(step):
        require_agreement(run, step)  # first: a rank that is lost alone is not a learning rate
        require_not_lost(run.engine, run.guard.suspects.start_peak, step)
        require_finite_everywhere(run.runtime.accelerator, own_state(run), step)
        require_unaltered(run.runtime.accelerator, run.guard.suspects, step, frozen=to_save)
    if to_save:
        save(run, step, wait=last or bool(result.stop_code))
    if snapshots.due(step):
        snapshots.take(step)
    if result.stop_code:
        raise InterruptedRunError(
            f"after step {step}, as asked; it is saved: continue with train.resume=auto",
            result.stop_code,
        )
    every = recipe.validation.every
    if every and step % every == 0 and not last:
        validate(run, step=step)


def _note(run: Run, bar: tqdm, result: StepResult) -> None:
    """Metrics, statistics and what stands out in them."""
    step, watcher = result.step, run.watcher
    modules, hidden = watcher.statistics(step), watcher.hidden_infinities(step)
    line = metrics_line(result, run.task.loss_parts(run, result))
    spikes = watcher.observe(line)  # on every rank: the adaptive clip depends on it
    if run.journal is None:
        return
    run.journal.step(line, modules)
    starving = run.journal.starving(line, run.recipe.data.workers)
    if starving is not None:
        run.runtime.say(f"warning: step {step}: {starving}")
    bar.set_postfix(loss=f"{result.loss:.4f}", grad=f"{result.grad_norm:.3g}", refresh=False)
    bar.update(step - bar.n)
    idle = idle_group_events(step, run.journal.idle_groups(line))
    for event in [*spike_events(step, spikes), *hidden_events(step, hidden), *idle]:
        run.journal.event(event)
        run.runtime.say(f"guard: step {step}: {event['verdict']['words']}")


def validate(run: Run, step: int) -> None:
    with averaged(run):
        _validate(run, step)


def averaged(run: Run) -> AbstractContextManager[None]:
    """Within it the model has what is saved: the averages, if the run keeps them."""
    return run.ema.applied() if run.ema is not None else nullcontext()


def _validate(run: Run, step: int) -> None:
    loss = run.task.held_out_loss(run)
    if run.journal is not None and loss is not None:
        if math.isfinite(loss):
            run.journal.held_out(step, loss)
            note_best(run, step)
        else:
            event = held_out_event(step)
            run.journal.event(event)
            run.runtime.say(f"guard: step {step}: {event['verdict']['words']}")
    run.task.show(run, step)
    run.runtime.trackers.samples(step, run.recipe.validation.prompts)
