"""Saves a run's state to checkpoints in a background thread, and restores it at the start.

To change what a checkpoint saves, start at `gather_training_state` and `load_training_state`, then at the field of
`SavedState` and its file in checkpoints/files.py. Each part comes from one to three more files of dit_lora/training:

    weights, optimizer   distributed/engine.py for all engines but ZeRO's (distributed/zero.py); names: optim/state.py
    averages             ema.py: `named_averages`
    guard                recovery/run_recovery.py: `RunRecovery.state_dict`; recovery/build.py: `load_guard_state`
    identity             prepare.py: `build_trajectory_config`, which a resume must match; the task adds its settings
    place                checkpoints/files.py: `describe_launch_topology`, which a resume may change

checkpoints/writer.py copies all fields of `SavedState` to host memory and needs no change for a new one.

The adapter next to the state is made from the same copy, by the function that writes the run's result.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dit_lora.config.validation import LossName
from dit_lora.errors import DitLoraError
from dit_lora.files import write_json
from dit_lora.numerics.dtensors import copy_full_values, gather_tensors
from dit_lora.training.checkpoints.files import (
    AdapterFunction,
    LoadedCheckpoint,
    SavedState,
    Tensors,
    checkpoint_path,
    describe_launch_topology,
    describe_topology_change,
    has_dropout,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from dit_lora.training.checkpoints.writer import CheckpointWriter
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.eval_losses import read_eval_losses
from dit_lora.training.result_metadata import build_metadata
from dit_lora.training.session.session import raise_on_all_ranks
from dit_lora.training.task import AnySetup

BEST_FILE = "best.json"


def gather_training_state(engine: Engine, ema: TrainedEMA | None = None) -> SavedState:
    """Gather everything that training changes, unsharded. Only the main process is sure to get values. Collective."""
    # Empty without an EMA: gathering nothing is no collective.
    averages = ema.named_averages() if ema else {}
    # Every rank gathers, though only one keeps the values: a rank that skipped this would hang the others.
    return SavedState(
        engine.trainable_state_dict(),
        engine.optimizer_state_dict(),
        gather_tensors(averages, keep_values=engine.accelerator.is_main_process),
    )


def load_training_state(loaded: LoadedCheckpoint, engine: Engine, ema: TrainedEMA | None = None) -> None:
    """Load weights, optimizer state and averages into `engine`, bit for bit; each rank loads its part."""
    stored, averages = loaded.state, ema.named_averages() if ema else {}
    # Compared before anything is filled: a model half restored would be neither the old nor the new.
    for live, saved in ((engine.trainable_state_dict(), stored.weights), (averages, stored.averages)):
        if {n: t.shape for n, t in live.items()} != {n: t.shape for n, t in saved.items()}:
            raise DitLoraError(
                f"the trainable parameters of {loaded.path} do not match this model; restore the recipe that wrote it"
            )
    # Copies: tensors that a CPU optimizer keeps must not live in a memory-mapped file.
    engine.load_state(stored.weights, {name: t.clone() for name, t in stored.optimizer.items()})
    for name, tensor in averages.items():
        copy_full_values(tensor, stored.averages[name])


def resume(
    setup: AnySetup, ema: TrainedEMA | None, trajectory_config: Mapping[str, Any], path: Path | None
) -> tuple[int, dict[str, Any]]:
    """Continue from the checkpoint `path`, if given, even if another machine layout wrote it.

    Returns its step and the guard's saved state (empty without a checkpoint). Raises `DitLoraError` if the step is
    beyond `train.steps`.
    """
    session, train = setup.session, setup.recipe.train
    if path is None:
        if train.resume == "auto":
            session.say(f"there is no checkpoint in {session.dir} yet; starting at step 0")
        return 0, {}
    launch_topology = describe_launch_topology(session)
    # Every rank reads the file: its part of a whole tensor is a slice, and nothing is sent.
    loaded = load_checkpoint(path, trajectory_config, launch_topology)
    load_training_state(loaded, setup.engine, ema)
    session.say(f"resumed at step {loaded.step} from {path}")
    uses_dropout = has_dropout(setup.transformer)
    differs = describe_topology_change(loaded.launch_topology, launch_topology, uses_dropout=uses_dropout)
    # A message, not an error: sums in another order are the same training up to rounding.
    if differs:
        session.say(f"resumed with another launch: {differs}")
    # `auto` takes the newest complete checkpoint; newer ones are torn.
    if train.resume == "auto":
        for step, newer in list_checkpoints(session.dir).items():
            if step > loaded.step:
                session.say(f"warning: skipped {newer}, which is incomplete or altered")
    if loaded.step > train.steps:
        raise DitLoraError(
            f"{path} is beyond train.steps={train.steps}; raise train.steps or resume an earlier checkpoint"
        )
    return loaded.step, loaded.guard_state


@dataclass(frozen=True)
class CheckpointManager:
    """The checkpoints of one run. The main process writes them one at a time in a background thread."""

    setup: AnySetup
    ema: TrainedEMA | None
    trajectory_config: Mapping[str, Any]
    writer: CheckpointWriter = field(default_factory=CheckpointWriter)

    def save(self, step: int, guard_state: Mapping[str, Any], *, wait: bool = False) -> None:
        """Write a checkpoint with the guard's state in the background.

        An error stops all ranks at the next step, or in this call if `wait` is true. Collective: all ranks first wait
        for an earlier checkpoint.
        """
        self.wait_for_writes()
        session, train = self.setup.session, self.setup.recipe.train
        state = gather_training_state(self.setup.engine, self.ema)
        if session.is_main:
            launch_topology = describe_launch_topology(session)
            write_adapter = self._build_adapter_writer(step)

            def write(copy: SavedState) -> None:
                save_checkpoint(
                    session.dir,
                    step,
                    copy,
                    self.trajectory_config,
                    keep=train.keep,
                    best_steps=[entry["step"] for entry in self._find_best_checkpoint()],
                    keep_adapters=train.keep_adapters,
                    guard_state=guard_state,
                    launch_topology=launch_topology,
                    write_adapter=write_adapter,
                )
                # The last checkpoint's step is told by the run's closing lines.
                if step < train.steps:
                    session.say(f"step {step}: saved {checkpoint_path(session.dir, step)}")

            self.writer.save_async(step, state, write)
        if wait:
            self.wait_for_writes()

    def _build_adapter_writer(self, step: int) -> AdapterFunction | None:
        """Function that writes a step's adapter as the run's result is written; None if every weight trains.

        Its header is the result's, without the output that only the result's verification compares.
        """
        setup = self.setup
        if setup.recipe.train.mode == "full":
            return None
        metadata = {**build_metadata(setup), "steps": step}

        def write_adapter(folder: Path, weights: Tensors) -> None:
            write = partial(setup.task.write_adapter, setup, folder, metadata, weights)
            # The state is complete and finite, and is saved without the adapter, for example in a warm-up from 0.
            if not setup.session.optional_work.run_optional_local_work("adapter", step, write):
                shutil.rmtree(folder / ".staged", ignore_errors=True)

        return write_adapter

    def update_best_checkpoint(self, step: int) -> None:
        """Write best.json after a validation or a rollback, and delete checkpoints that need not be kept."""
        folder, train = self.setup.session.dir, self.setup.recipe.train

        def write_best() -> None:
            best = self._find_best_checkpoint()
            file = folder / "checkpoints" / BEST_FILE
            try:
                write_json(file, best)
                prune_checkpoints(folder, step, train.keep, [entry["step"] for entry in best], train.keep_adapters)
            except OSError as error:
                # The checkpoints themselves are whole.
                self.setup.session.say(f"warning: cannot write {file}: {error.strerror or error}")

        if train.keep_best and self.setup.session.is_main:
            # In the saver's thread: the checkpoint under way is whole by then, and counted.
            self.writer.submit(write_best)

    def _find_best_checkpoint(self) -> list[dict[str, Any]]:
        recipe = self.setup.recipe
        return find_best_checkpoints(self.setup.session.dir, recipe.train.keep_best, recipe.validation.ranking_loss)

    def wait_for_writes(self) -> None:
        """Wait until every checkpoint is on the disk. Raises on all ranks if writing failed. Collective."""
        error = self.writer.wait()
        if error is not None:
            # The error that is raised below shows it.
            error.is_shown = True
        raise_on_all_ranks(self.setup.accelerator, error)

    def poll_exit_code(self) -> int:
        """Exit code if writing this process's files has failed so far, else 0. Does not wait for pending writes."""
        # Another process may have taken the folder for a dead run's: this one must write no more.
        lost = self.setup.session.lock.get_run_folder_takeover_error()
        if lost is not None:
            self.writer.record_error(lost)
        return self.writer.poll_exit_code()

    @contextmanager
    def finish_writes(self) -> Iterator[None]:
        """Finish writing a pending checkpoint when the context ends, even by an exception."""
        try:
            yield
        finally:
            error = self.writer.wait()
            if error is not None and not error.is_shown:
                self.setup.session.say(f"warning: {error}")


def find_best_checkpoints(run_dir: Path, count: int, loss_name: LossName = "eval_loss") -> list[dict[str, Any]]:
    """The `count` checkpoints with the lowest loss of this name, lowest first."""
    if not count:
        return []
    losses, checkpoints = read_eval_losses(run_dir, loss_name), list_checkpoints(run_dir)
    # Of equal losses, the earlier step comes first.
    measured = sorted((losses[step], step) for step in checkpoints if step in losses)
    return [{"checkpoint": checkpoints[step].name, "step": step, loss_name: loss} for loss, step in measured[:count]]
