"""Checkpoints that a run is continued from: written in a background thread, and restored at the start."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.numerics.dtensors import fill, gathered
from dit_lora.training.checkpoints.compatibility import has_dropout, moved, place_of
from dit_lora.training.checkpoints.files import (
    Loaded,
    SavedState,
    checkpoint_steps,
    load_checkpoint,
    prune,
    save_checkpoint,
)
from dit_lora.training.checkpoints.writer import Saver
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.journal import held_out_losses
from dit_lora.training.session.session import agree
from dit_lora.training.task import AnySetup

BEST = "best.json"


def resume(
    setup: AnySetup, ema: TrainedEMA | None, identity: Mapping[str, Any], path: Path | None
) -> tuple[int, dict[str, Any]]:
    """Continue from the checkpoint `path`, if given, even if another machine layout wrote it.

    Returns the step to continue from, and the guard's saved state (empty without a checkpoint). Raises `DitLoraError`
    if the checkpoint is beyond `train.steps`.
    """
    session, train = setup.session, setup.recipe.train
    if path is None:
        if train.resume == "auto":
            session.say(f"no checkpoint in {session.dir} yet: starting at step 0")
        return 0, {}
    launch_topology = place_of(session)
    # Every rank reads the file: its part of a whole tensor is a slice, and nothing is sent.
    loaded = load_checkpoint(path, identity, launch_topology)
    restore(loaded, setup.engine, ema)
    session.say(f"resumed at step {loaded.step} from {path}")
    differs = moved(loaded.place, launch_topology, dropout=has_dropout(setup.transformer))
    # A message, not an error: sums in another order are the same training up to rounding.
    if differs:
        session.say(f"continued elsewhere: {differs}")
    # `auto` takes the newest complete checkpoint; newer ones are torn.
    if train.resume == "auto":
        for step, newer in checkpoint_steps(session.dir).items():
            if step > loaded.step:
                session.say(f"warning: passed over {newer}: it is torn or altered")
    if loaded.step > train.steps:
        raise DitLoraError(
            f"train.steps is {train.steps}, and {path} is beyond it; raise train.steps or "
            "resume an earlier checkpoint"
        )
    return loaded.step, loaded.guard


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run. The main process writes them one at a time in a background thread."""

    setup: AnySetup
    ema: TrainedEMA | None
    identity: Mapping[str, Any]
    saver: Saver = field(default_factory=Saver)

    def save(self, step: int, guard: Mapping[str, Any], *, wait: bool = False) -> None:
        """Write a checkpoint with the guard's record; an error stops all ranks at the next step, or here with `wait`.

        Collective: all ranks first wait for an earlier checkpoint.
        """
        self.settle()
        session, train, engine = self.setup.session, self.setup.recipe.train, self.setup.engine
        # Empty without an EMA: gathering nothing is no collective.
        averages = self.ema.tensors() if self.ema else {}
        # Every rank gathers, though only one keeps the values: a rank that skipped this would hang the others.
        state = SavedState(
            engine.weights(), engine.moments(), gathered(averages, keep=session.is_main)
        )
        if session.is_main:
            launch_topology = place_of(session)

            def write(copy: SavedState) -> None:
                save_checkpoint(
                    session.dir,
                    step,
                    copy,
                    self.identity,
                    keep=train.keep,
                    best=[
                        entry["step"] for entry in best_checkpoints(session.dir, train.keep_best)
                    ],
                    guard=guard,
                    place=launch_topology,
                )

            self.saver.start(step, state, write)
        if wait:
            self.settle()

    def note_best(self, step: int) -> None:
        """Write best.json after a validation or a rollback, and delete checkpoints that need not be kept."""
        folder, train = self.setup.session.dir, self.setup.recipe.train

        def note() -> None:
            best = best_checkpoints(folder, train.keep_best)
            file = folder / "checkpoints" / BEST
            try:
                write_whole(file, json.dumps(best, indent=2) + "\n")
                prune(folder, step, train.keep, [entry["step"] for entry in best])
            except OSError as error:
                # The checkpoints themselves are whole.
                self.setup.session.say(f"warning: cannot write {file}: {error.strerror or error}")

        if train.keep_best and self.setup.session.is_main:
            # In the saver's thread: the checkpoint under way is whole by then, and counted.
            self.saver.then(note)

    def settle(self) -> None:
        """Wait until every checkpoint is on the disk. Raises on all ranks if writing failed. Collective."""
        error = self.saver.wait()
        if error is not None:
            # The error that is raised below shows it.
            error.shown = True
        agree(self.setup.session.accelerator, error)

    def trouble(self) -> int:
        """Exit code of an error with this process's files so far, or 0. Does not wait."""
        # Another process may have taken the folder for a dead run's: this one must write no more.
        lost = self.setup.session.lock.lost()
        if lost is not None:
            self.saver.fail(lost)
        return self.saver.stop_code()

    @contextmanager
    def written_to_the_end(self) -> Iterator[None]:
        """Finish writing a pending checkpoint when the context ends, even by an exception."""
        try:
            yield
        finally:
            error = self.saver.wait()
            if error is not None and not error.shown:
                self.setup.session.say(f"warning: {error}")


def restore(loaded: Loaded, engine: Engine, ema: TrainedEMA | None = None) -> None:
    """Load weights, optimizer state and averages into `engine`, bit for bit; each rank loads its part."""
    stored, averages = loaded.state, ema.tensors() if ema else {}
    # Compared before anything is filled: a model half restored would be neither the old nor the new.
    for live, saved in ((engine.weights(), stored.weights), (averages, stored.averages)):
        if {n: t.shape for n, t in live.items()} != {n: t.shape for n, t in saved.items()}:
            raise DitLoraError(f"{loaded.path}: its trainable parameters are not this model's")
    # Copies: tensors that a CPU optimizer keeps must not live in a memory-mapped file.
    engine.load(stored.weights, {name: t.clone() for name, t in stored.optimizer.items()})
    for name, tensor in averages.items():
        fill(tensor, stored.averages[name])


def best_checkpoints(run_dir: Path, count: int) -> list[dict[str, Any]]:
    """The `count` checkpoints with the lowest held-out loss, lowest first."""
    if not count:
        return []
    losses, checkpoints = held_out_losses(run_dir), checkpoint_steps(run_dir)
    # Of equal losses, the earlier step comes first.
    measured = sorted((losses[step], step) for step in checkpoints if step in losses)
    return [
        {"checkpoint": checkpoints[step].name, "step": step, "held_out_loss": loss}
        for loss, step in measured[:count]
    ]
