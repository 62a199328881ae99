"""One run from a prepared model to a saved adapter: resume, train with its hooks, finish."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from tqdm import tqdm

import dit_lora
from dit_lora.adapters.store import BASE_FILE, save_adapter
from dit_lora.compat import probe_environment
from dit_lora.config import Recipe
from dit_lora.data.loader import Batch, ClipDataset, PositionSampler, build_loader
from dit_lora.errors import DitLoraError, InterruptedRunError
from dit_lora.families.base import Checkpoint, Family
from dit_lora.numerics.gate import NonFiniteError
from dit_lora.numerics.streams import Streams
from dit_lora.objectives import LossOutput
from dit_lora.training.checkpoint import load_checkpoint, save_checkpoint
from dit_lora.training.journal import Journal, held_out_losses, tracker_values
from dit_lora.training.loop import Loop, StepResult, train
from dit_lora.training.optimizer import build_optimizer, build_schedule
from dit_lora.training.precompute import Precomputed
from dit_lora.training.runtime import Runtime, agree, open_run_folder, stop_signals
from dit_lora.training.validation import held_out_loss, sample_videos


@dataclass
class Run:
    """Everything that a started run holds."""

    runtime: Runtime
    family: Family
    checkpoint: Checkpoint
    encoded: Precomputed
    model: nn.Module
    """As Accelerate prepared it."""
    optimizer: torch.optim.Optimizer
    start_step: int
    journal: Journal | None
    """On the main process alone."""

    @property
    def recipe(self) -> Recipe:
        return self.runtime.recipe

    @property
    def transformer(self) -> nn.Module:
        return self.runtime.accelerator.unwrap_model(self.model)

    @property
    def identity(self) -> dict[str, Any]:
        return run_identity(self.runtime, self.encoded, self.transformer)


def prepare(
    runtime: Runtime,
    family: Family,
    checkpoint: Checkpoint,
    encoded: Precomputed,
    transformer: nn.Module,
    groups: list[dict[str, Any]],
    resume_from: Path | None,
) -> Run:
    """Optimizer, device placement and DDP, and the state of `resume_from` if given."""
    recipe = runtime.recipe
    if recipe.train.checkpointing == "full":
        transformer.enable_gradient_checkpointing()  # type: ignore[operator]
    optimizer = build_optimizer(groups, recipe.optim)
    model, optimizer = runtime.accelerator.prepare(transformer, optimizer)
    run = Run(runtime, family, checkpoint, encoded, model, optimizer, start_step=0, journal=None)
    if resume_from is not None:
        run.start_step = load_checkpoint(resume_from, run.transformer, optimizer, run.identity)
        runtime.say(f"resumed at step {run.start_step} from {resume_from}")
    elif recipe.train.resume == "auto":
        runtime.say(f"no checkpoint in {runtime.dir} yet: starting at step 0")
    if run.start_step > recipe.train.steps:
        raise DitLoraError(
            f"train.steps is {recipe.train.steps}, and {resume_from} is beyond it; raise train.steps or "
            "resume an earlier checkpoint"
        )
    open_run_folder(runtime)
    if runtime.is_main:
        run.journal = Journal(
            runtime.dir, timesteps=checkpoint.train_timesteps, start_step=run.start_step
        )
    for group in groups:
        count = sum(p.numel() for p in group["params"])
        runtime.say(f"group {group['name']}: {count:,} parameters, learning rate {group['lr']:g}")
    return run


def fit(run: Run) -> None:
    """Train to `train.steps` with metrics, checkpoints and validation; Ctrl-C saves and stops."""
    recipe, accelerator, runtime = run.recipe, run.runtime.accelerator, run.runtime
    if recipe.run.trackers:
        values = recipe.model_dump(mode="json")
        wandb = {"dir": str(runtime.dir), "name": runtime.dir.name, "config": values}
        accelerator.init_trackers("dit-lora", init_kwargs={"wandb": wandb})
    if run.start_step == 0:
        _validate(run, step=0)
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
            _after_step(run, bar, result)

        try:
            train(
                _loop(run),
                _batches(run),
                start_step=run.start_step,
                steps=recipe.train.steps,
                stop_asked=stop_asked,
                on_step=on_step,
            )
        except NonFiniteError as error:
            raise _stopped_by_guard(run, error) from error


def finish(run: Run) -> Path | None:
    """Save the adapter, checked, then validate; returns its path on the main process."""
    runtime, steps = run.runtime, run.recipe.train.steps
    error, path = None, None
    if runtime.is_main:
        try:
            path = save_adapter(
                run.transformer, run.family.pipeline_class, runtime.dir / "adapter", provenance(run)
            )
        except (OSError, SafetensorError) as problem:
            error = DitLoraError(
                f"cannot write the adapter to {runtime.dir / 'adapter'}: {problem}; the checkpoint "
                f"of step {steps} is whole: free space and run again with train.resume=auto"
            )
        except DitLoraError as problem:
            error = problem
    agree(runtime.accelerator, error)
    # After the adapter is safe: sampling takes the most memory and time of all.
    _validate(run, step=steps)
    return path


def run_identity(runtime: Runtime, encoded: Precomputed, transformer: nn.Module) -> dict[str, Any]:
    """The values that a resumed run must share with its checkpoint, flat, named as in the recipe."""
    recipe = runtime.recipe
    values = recipe.model_dump(mode="json")
    batch = recipe.train.batch_size * recipe.train.accumulate * runtime.accelerator.num_processes
    flat = {
        "model.family": recipe.model.family,
        "model.dtype": str(runtime.precision.dtype),
        "model (digest of the transformer's files)": encoded.transformer_digest,
        "data (digest of clips, captions and shape)": encoded.data_digest,
        "data.caption_dropout": recipe.data.caption_dropout,
        "train.seed": recipe.train.seed,
        "train.batch_size x accumulate x processes": batch,
    }
    flat |= {f"lora.{key}": value for key, value in values["lora"].items()}
    optim = dict(values["optim"])
    groups = optim.pop("groups")
    flat |= {f"optim.{key}": value for key, value in optim.items()}
    flat |= {f"optim.groups.{name}": group for name, group in groups.items() if group}
    given = recipe.optim.groups.given().values()
    if any((group.schedule or recipe.optim.schedule) != "constant" for group in given):
        flat["train.steps"] = recipe.train.steps  # where the schedule ends
    return flat


def provenance(run: Run) -> dict[str, Any]:
    """What the adapter's header says of its making; a local checkpoint is named without its folders."""
    recipe, path = run.recipe, Path(run.recipe.model.path).expanduser()
    return {
        "version": dit_lora.__version__,
        "family": recipe.model.family,
        "base_model": path.resolve().name if path.is_dir() else recipe.model.path,
        "revision": recipe.model.revision,
        "transformer_digest": run.encoded.transformer_digest,
        "rank": recipe.lora.rank,
        "alpha": recipe.lora.alpha or recipe.lora.rank,
        "dropout": recipe.lora.dropout,
        "steps": recipe.train.steps,
        "seed": recipe.train.seed,
        "dtype": str(run.runtime.precision.dtype),
        "video": {key: getattr(recipe.data, key) for key in ("frames", "height", "width", "fps")},
        "packages": dict(probe_environment().versions),
    }


def _loop(run: Run) -> Loop:
    recipe = run.recipe

    def losses(model: nn.Module, batch: Batch, streams: Streams) -> LossOutput:
        return run.checkpoint.losses(model, batch.tensors, streams)

    return Loop(
        accelerator=run.runtime.accelerator,
        model=run.model,
        losses=losses,
        optimizer=run.optimizer,
        schedule=build_schedule(recipe.optim, recipe.train.steps),
        optim=recipe.optim,
        accumulate=recipe.train.accumulate,
        seed=recipe.train.seed,
    )


def _batches(run: Run) -> torch.utils.data.DataLoader:
    recipe, accelerator = run.recipe, run.runtime.accelerator
    dataset = ClipDataset(
        run.encoded.clips, seed=recipe.train.seed, caption_dropout=recipe.data.caption_dropout
    )
    sampler = PositionSampler(
        start_step=run.start_step,
        steps=recipe.train.steps,
        batch_size=recipe.train.batch_size,
        accumulate=recipe.train.accumulate,
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
    )
    on_gpu = accelerator.device.type == "cuda"
    return build_loader(dataset, sampler, workers=recipe.data.workers, pin_memory=on_gpu)


def _after_step(run: Run, bar: tqdm, result: StepResult) -> None:
    recipe, step = run.recipe, result.step
    if run.journal is not None:
        line = run.journal.step(result)
        run.runtime.accelerator.log(tracker_values(line), step=step)
        bar.set_postfix(loss=f"{result.loss:.4f}", grad=f"{result.grad_norm:.3g}", refresh=False)
        bar.update()
    last = step == recipe.train.steps
    if step % recipe.train.save_every == 0 or last or result.stop_code:
        _save(run, step)
    if result.stop_code:
        raise InterruptedRunError(
            f"after step {step}, as asked; it is saved: continue with train.resume=auto",
            result.stop_code,
        )
    every = recipe.validation.every
    if every and step % every == 0 and not last:
        _validate(run, step=step)


def _save(run: Run, step: int) -> None:
    """One process writes; all learn whether it could."""
    error = None
    if run.runtime.is_main:
        try:
            save_checkpoint(
                run.runtime.dir,
                step,
                run.transformer,
                run.optimizer,
                run.identity,
                keep=run.recipe.train.keep,
            )
        except DitLoraError as problem:
            error = problem
    agree(run.runtime.accelerator, error)


def _validate(run: Run, step: int) -> None:
    loss = held_out_loss(run.runtime, run.checkpoint, run.model, run.encoded.clips)
    if run.journal is not None and loss is not None:
        run.journal.held_out(step, loss)
        run.runtime.accelerator.log({"held_out_loss": loss}, step=step)
    sample_videos(run.runtime, run.checkpoint, run.model, run.encoded, step)


def _stopped_by_guard(run: Run, error: NonFiniteError) -> DitLoraError:
    """Keep the weights of the last good step, log the event, set bad cache entries aside."""
    began, step = time.perf_counter(), int(str(error.event["step"])) - 1
    notes = []
    if run.journal is not None:
        aside = run.encoded.clips.set_aside_bad(error.event["sample_ids"])
        notes += [f"set aside {path}: the next start encodes it anew" for path in aside]
        run.journal.event({**error.event, "seconds": time.perf_counter() - began})
    if step > 0:
        try:
            _save(run, step)
            notes.append(f"step {step} is saved: {_advice(error)}")
        except DitLoraError as problem:
            notes.append(str(problem))
    else:
        notes.append(f"no step was taken yet: {_advice(error)}")
    return NonFiniteError("\n".join([str(error), *notes]), error.event)


def _advice(error: NonFiniteError) -> str:
    if error.data_at_fault:
        return "continue with train.resume=auto"
    return (
        "no cached sample is at fault, and the same step would come out the same; start afresh with a lower "
        "learning rate (optim.groups) or model.dtype=fp32"
    )


def summary(run: Run, adapter: Path, report: Path) -> str:
    """What the run made, where, and by how much the held-out loss fell."""
    losses = held_out_losses(run.runtime.dir)
    lines = [f"adapter: {adapter}", f"report:  {report}"]
    base = adapter.with_name(BASE_FILE)
    if base.exists():
        lines.insert(
            1, f"base weights: {base}: load these too, before the adapter (docs/design.md)"
        )
    if len(losses) > 1:
        first, last = losses[min(losses)], losses[max(losses)]
        change = 100 * (last / first - 1)
        lines.append(
            f"loss on held-out noise: {first:.4f} before, {last:.4f} after ({change:+.1f}%)"
        )
    return "\n".join(lines)
