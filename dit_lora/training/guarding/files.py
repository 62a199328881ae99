"""Changes the files of a run's folder for its guard: events, checkpoints, the quarantine, bundles."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from dit_lora.config.recipe import Recipe
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.data.sources.scan import class_names
from dit_lora.guard.event import Event
from dit_lora.guard.replay import MicroBatch
from dit_lora.terminal import printable
from dit_lora.training.best import note_best
from dit_lora.training.bundles import keep_bundle
from dit_lora.training.checkpoints.files import checkpoint_steps, remove_checkpoints_after
from dit_lora.training.guarding.setup import GuardStart
from dit_lora.training.guarding.watch import StepWatcher, prime_spikes
from dit_lora.training.journal import Journal
from dit_lora.training.saved_state import Checkpoints


class GuardFiles:
    """Implements `RunFiles` in a run's folder."""

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
        if self.journal is not None:
            self.checkpoints.saver.wait()  # a checkpoint under way may be one to remove
            with self.checkpoints.saver.noted():
                self.journal.rewind(step)
                if other_trajectory:
                    remove_checkpoints_after(self.setup.session.dir, step)
            note_best(self.setup, self.checkpoints.saver, step)
        # Collective, so outside of the condition: every rank's medians go back with the run.
        prime_spikes(self.watcher, self.journal)

    def quarantined(self, quarantine: Quarantine) -> None:
        if self.setup.session.is_main:
            with self.checkpoints.saver.noted():
                quarantine.save()

    def left_out(self, step: int, guard: Mapping[str, Any]) -> None:
        train = self.setup.recipe.train
        if step % train.save_every == 0 or step == train.steps:
            self.save(step, guard)

    def save(self, step: int, guard: Mapping[str, Any]) -> None:
        self.checkpoints.save(step, guard, wait=True)

    def set_aside_bad(self, samples: Sequence[str]) -> list[str]:
        if not self.setup.session.is_main:
            return []
        aside = self.setup.data.clips.set_aside_bad(samples)
        return [f"set aside {path}: the next start encodes it anew" for path in aside]

    def newest_saved(self) -> int:
        steps = [0]
        if self.setup.session.is_main:
            self.checkpoints.saver.wait()  # one may be under way
            steps = [max(checkpoint_steps(self.setup.session.dir), default=0)]
        broadcast_object_list(steps)
        return steps[0]

    def bundle(self, micro_batch: MicroBatch, event: Event) -> str | None:
        """Write a bundle on the rank that ran the micro-batch, as far as `guard.bundles` goes; return its path."""
        setup = self.setup
        if self._bundles >= setup.recipe.guard.bundles:
            return None
        self._bundles += 1
        # Before any rank leaves: sharded weights are gathered by all of them.
        weights = setup.engine.weights()
        if setup.engine.lockstep and not setup.session.is_main:
            return None  # all ranks have the same
        place = f"rank_{micro_batch.rank}_micro_step_{micro_batch.micro_step}"
        name = f"step_{micro_batch.step:06d}_{place}"
        earlier = len(list((setup.session.dir / "bundles").glob(f"{name}*")))  # of the same step
        folder = setup.session.dir / "bundles" / (f"{name}_again_{earlier}" if earlier else name)
        try:
            keep_bundle(
                folder,
                micro_batch,
                event.record(),
                weights,
                _whole_recipe(setup.recipe, micro_batch),
                setup.session.precision,
                setup.data.transformer_digest,
                self.start.state.switched_off,
                self.start.start_peak,
            )
        except OSError as error:  # a run is worth more than a bundle
            words = f"warning: cannot write {folder}: {error.strerror}"
            tqdm.write(printable(words), file=sys.stderr)
            return None
        return f"bundles/{folder.name}"

    def say(self, line: str) -> None:
        self.setup.session.say(line)


def _whole_recipe(recipe: Recipe, micro_batch: MicroBatch) -> Recipe:
    """Return the recipe with the names of its classes: a replay has no data to read them from."""
    if "class_labels" not in micro_batch.tensors:
        return recipe
    names = tuple(class_names(recipe.data, recipe.cache_dir))
    data = recipe.data.model_copy(update={"classes": names})
    return recipe.model_copy(update={"data": data})
