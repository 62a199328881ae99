"""Writes recovery's records to a run's folder: events, checkpoints, the quarantine, replay bundles."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.data.sources.scan import find_class_names_in_data
from dit_lora.environment.versions import probe_environment
from dit_lora.guard.event import Event
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.repro_bundle import write_bundle
from dit_lora.numerics.precision import DTYPES
from dit_lora.numerics.ranks import broadcast_object
from dit_lora.terminal import make_printable
from dit_lora.training.checkpoint_state import Checkpoints
from dit_lora.training.checkpoints.files import list_checkpoints, remove_checkpoints_after
from dit_lora.training.journal import Journal
from dit_lora.training.recovery.monitoring import StepWatcher, share_spike_history
from dit_lora.training.recovery.state import GuardStart


class RecoveryFiles:
    """Changes a run's files for recovery. Called on every rank; only the main process writes, except for bundles."""

    def __init__(
        self, checkpoints: Checkpoints, journal: Journal | None, watcher: StepWatcher, guard_start: GuardStart
    ) -> None:
        self.setup = checkpoints.setup
        self.checkpoints = checkpoints
        self.journal = journal
        self.watcher = watcher
        self.guard_start = guard_start
        # Bundles of earlier starts count too.
        self._num_bundles = len(list((self.setup.session.dir / "bundles").glob("step_*")))

    def write_event(self, event: Event) -> None:
        if self.journal is not None:
            self.journal.write_event(event)

    def rewind(self, step: int, *, is_new_trajectory: bool) -> None:
        """Drop the log lines of steps after `step`; with `is_new_trajectory`, also the checkpoints of these steps."""
        if self.journal is not None:
            self.checkpoints.writer.wait()  # a checkpoint under way may be one to remove
            with self.checkpoints.writer.record_os_errors():
                self.journal.rewind(step)
                if is_new_trajectory:
                    remove_checkpoints_after(self.setup.session.dir, step)
            # The losses of later steps are dropped from the log, so other checkpoints may be the best now.
            self.checkpoints.update_best(step)
        # Collective, so not inside the condition: every rank's medians are rolled back with the run.
        share_spike_history(self.watcher, self.journal)

    def save_quarantine(self, quarantine: Quarantine) -> None:
        """Write the quarantine, the list of excluded samples, to the run's folder."""
        if self.setup.session.is_main:
            with self.checkpoints.writer.record_os_errors():
                quarantine.save()

    def save_if_due(self, step: int, guard_state: Mapping[str, Any]) -> None:
        """Save a checkpoint with the guard's state after a skipped step, if one is due."""
        train = self.setup.recipe.train
        # A skipped step has no result, so the code that saves after a step does not run for it.
        if step % train.save_every == 0 or step == train.steps:
            self.save(step, guard_state)

    def save(self, step: int, guard_state: Mapping[str, Any]) -> None:
        """Checkpoint the present weights with the guard's record; raises if they are not finite."""
        self.checkpoints.save(step, guard_state, wait=True)

    def mark_bad_entries(self, samples: Sequence[str]) -> list[str]:
        """Mark the bad cache entries of these samples. Returns messages, on the main process only."""
        if not self.setup.session.is_main:
            return []
        mark_paths = self.setup.data.training_set.mark_bad_entries(samples)
        return [f"marked {path} as bad: the next start encodes it again" for path in mark_paths]

    def find_newest_saved_step(self) -> int:
        """Step of the newest checkpoint, equal on all ranks; 0 if there is none."""
        step = 0
        if self.setup.session.is_main:
            self.checkpoints.writer.wait()  # one may be under way
            step = max(list_checkpoints(self.setup.session.dir), default=0)
        return broadcast_object(step)

    def write_bundle(self, micro_batch: MicroBatch, event: Event) -> str | None:
        """Write a bundle, the inputs of `dit-lora replay`, on the rank that ran the micro-batch.

        At most `guard.bundles` per run.

        Returns the bundle's path relative to the run's folder, or None. Collective if weights are sharded.
        """
        setup = self.setup
        if self._num_bundles >= setup.recipe.guard.bundles:
            return None
        # Counted even if this rank writes nothing: ranks that call this together must keep equal counts.
        self._num_bundles += 1
        # Before any rank returns: all of them gather sharded weights.
        weights = setup.engine.trainable_state_dict()
        if setup.engine.collective_forward and not setup.session.is_main:
            # All ranks have the same micro-batch and weights.
            return None
        name = f"step_{micro_batch.step:06d}_rank_{micro_batch.rank}_micro_step_{micro_batch.micro_step}"
        # Bundles of the same step and micro-batch: the step failed before.
        earlier = len(list((setup.session.dir / "bundles").glob(f"{name}*")))
        folder = setup.session.dir / "bundles" / (f"{name}_again_{earlier}" if earlier else name)
        try:
            facts, limit = self._build_bundle_metadata(micro_batch, event), setup.recipe.guard.bundle_mib
            write_bundle(folder, facts, micro_batch.tensors, weights, limit_mib=limit)
        # A run is worth more than a bundle.
        except OSError as error:
            tqdm.write(make_printable(f"warning: cannot write {folder}: {error.strerror}"), file=sys.stderr)
            return None
        return f"bundles/{folder.name}"

    def _build_bundle_metadata(self, micro_batch: MicroBatch, event: Event) -> dict[str, Any]:
        """Metadata to rerun a micro-batch elsewhere, in addition to its tensors and the weights."""
        setup, recipe = self.setup, self.setup.recipe
        if "class_labels" in micro_batch.tensors:
            # A replay has no data set to read the class names from.
            classes = tuple(find_class_names_in_data(recipe.data, recipe.cache_dir))
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"classes": classes})})
        return {
            "event": event.to_record(),
            "recipe": recipe.model_dump(mode="json"),
            "replay": {
                "step": micro_batch.step,
                "micro_step": micro_batch.micro_step,
                "rank": micro_batch.rank,
                "ids": micro_batch.ids,
                "draws": micro_batch.draw_numbers,
                "faults": dict(micro_batch.faults),
            },
            "switched_off": list(self.guard_start.state.switched_off),
            "start_peak": self.guard_start.start_peak,
            "dtype": next(name for name, dtype in DTYPES.items() if dtype is setup.dtype),
            "transformer_digest": setup.data.transformer_digest,
            "packages": dict(probe_environment().versions),
        }

    def say(self, line: str) -> None:
        self.setup.session.say(line)
