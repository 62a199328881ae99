"""Changes the files of a run's folder for the guard: events, checkpoints, the quarantine, replay bundles."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from dit_lora.config.recipe import Recipe
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.data.sources.scan import class_names
from dit_lora.environment.versions import probe_environment
from dit_lora.guard.bundle import write_bundle
from dit_lora.guard.event import Event
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.precision import DTYPES
from dit_lora.terminal import printable
from dit_lora.training.checkpoints.files import checkpoint_steps, remove_checkpoints_after
from dit_lora.training.guarding.state import GuardStart
from dit_lora.training.guarding.watch import StepWatcher, prime_spikes
from dit_lora.training.journal import Journal
from dit_lora.training.saved_state import Checkpoints


class RecoveryFiles:
    """Changes a run's files for recovery. Called on every rank; only the main process writes, except for bundles."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        journal: Journal | None,
        watcher: StepWatcher,
        start: GuardStart,
    ) -> None:
        self.setup = checkpoints.setup
        self.checkpoints = checkpoints
        self.journal = journal
        self.watcher = watcher
        self.start = start
        # Bundles of earlier starts count too.
        self._bundles = len(list((self.setup.session.dir / "bundles").glob("step_*")))

    def event(self, event: Event) -> None:
        if self.journal is not None:
            self.journal.event(event)

    def rewind(self, step: int, *, other_trajectory: bool) -> None:
        """Drop the log lines of steps after `step`; with `other_trajectory`, also the checkpoints of these steps."""
        if self.journal is not None:
            self.checkpoints.saver.wait()  # a checkpoint under way may be one to remove
            with self.checkpoints.saver.noted():
                self.journal.rewind(step)
                if other_trajectory:
                    remove_checkpoints_after(self.setup.session.dir, step)
            # The losses of later steps are dropped from the log, so other checkpoints may be the best now.
            self.checkpoints.note_best(step)
        # Collective, so not inside the condition: every rank's medians are rolled back with the run.
        prime_spikes(self.watcher, self.journal)

    def quarantined(self, quarantine: Quarantine) -> None:
        """Write the list of excluded samples."""
        if self.setup.session.is_main:
            with self.checkpoints.saver.noted():
                quarantine.save()

    def left_out(self, step: int, guard: Mapping[str, Any]) -> None:
        """Save after a skipped step, with the guard's record, if a checkpoint is due."""
        train = self.setup.recipe.train
        # A skipped step has no result, so the code that saves after a step does not run for it.
        if step % train.save_every == 0 or step == train.steps:
            self.save(step, guard)

    def save(self, step: int, guard: Mapping[str, Any]) -> None:
        """Checkpoint the present weights with the guard's record; raises if they are not finite."""
        self.checkpoints.save(step, guard, wait=True)

    def set_aside_bad(self, samples: Sequence[str]) -> list[str]:
        """Rename these samples' bad cache entries; returns messages, on the main process only."""
        if not self.setup.session.is_main:
            return []
        aside = self.setup.data.clips.set_aside_bad(samples)
        return [f"set aside {path}: the next start encodes it anew" for path in aside]

    def newest_saved(self) -> int:
        """Step of the newest checkpoint, equal on all ranks; 0 if there is none."""
        steps = [0]
        if self.setup.session.is_main:
            self.checkpoints.saver.wait()  # one may be under way
            steps = [max(checkpoint_steps(self.setup.session.dir), default=0)]
        broadcast_object_list(steps)
        return steps[0]

    def bundle(self, micro_batch: MicroBatch, event: Event) -> str | None:
        """Write the inputs of `dit-lora replay` on the rank that ran the micro-batch, at most `guard.bundles` per run.

        Returns the bundle's path relative to the run's folder, or None. Collective if weights are sharded.
        """
        setup = self.setup
        if self._bundles >= setup.recipe.guard.bundles:
            return None
        # Counted even if this rank writes nothing: ranks that call this together must keep equal counts.
        self._bundles += 1
        # Before any rank returns: all of them gather sharded weights.
        weights = setup.engine.weights()
        if setup.engine.lockstep and not setup.session.is_main:
            # All ranks have the same micro-batch and weights.
            return None
        position = f"rank_{micro_batch.rank}_micro_step_{micro_batch.micro_step}"
        name = f"step_{micro_batch.step:06d}_{position}"
        # Bundles of the same step and micro-batch: the step failed before.
        earlier = len(list((setup.session.dir / "bundles").glob(f"{name}*")))
        folder = setup.session.dir / "bundles" / (f"{name}_again_{earlier}" if earlier else name)
        try:
            facts, limit = self._facts(micro_batch, event), setup.recipe.guard.bundle_mib
            write_bundle(folder, facts, micro_batch.tensors, weights, limit_mib=limit)
        # A run is worth more than a bundle.
        except OSError as error:
            message = f"warning: cannot write {folder}: {error.strerror}"
            tqdm.write(printable(message), file=sys.stderr)
            return None
        return f"bundles/{folder.name}"

    def _facts(self, micro_batch: MicroBatch, event: Event) -> dict[str, Any]:
        """Metadata to rerun a micro-batch elsewhere, in addition to its tensors and the weights."""
        setup = self.setup
        return {
            "event": event.record(),
            "recipe": _whole_recipe(setup.recipe, micro_batch).model_dump(mode="json"),
            "replay": {
                "step": micro_batch.step,
                "micro_step": micro_batch.micro_step,
                "rank": micro_batch.rank,
                "ids": micro_batch.ids,
                "draws": micro_batch.draws,
                "faults": dict(micro_batch.faults),
            },
            "switched_off": list(self.start.state.switched_off),
            "start_peak": self.start.start_peak,
            "dtype": next(name for name, dtype in DTYPES.items() if dtype is setup.dtype),
            "transformer_digest": setup.data.transformer_digest,
            "packages": dict(probe_environment().versions),
        }

    def say(self, line: str) -> None:
        self.setup.session.say(line)


def _whole_recipe(recipe: Recipe, micro_batch: MicroBatch) -> Recipe:
    """The recipe with its class names filled in: a replay has no data set to read them from."""
    if "class_labels" not in micro_batch.tensors:
        return recipe
    names = tuple(class_names(recipe.data, recipe.cache_dir))
    data = recipe.data.model_copy(update={"classes": names})
    return recipe.model_copy(update={"data": data})
