"""Holds a run's state of the last check that found it right. A fault that is found later rolls the run back to it."""

from dit_lora.guard.snapshots import Snapshots
from dit_lora.numerics.ranks import gather_object
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.recovery.run_recovery import RunRecovery
from dit_lora.training.recovery.state_checks import collect_local_state


class LastGoodSnapshot:
    """One snapshot of weights, optimizer state and moving averages, and the guard's scale of learning rates.

    It takes as much host memory as they do. Every rank calls the same methods in the same steps.
    """

    def __init__(self, recovery: RunRecovery, ema: TrainedEMA | None) -> None:
        self._recovery = recovery
        engine = recovery.engine
        self._snapshots = Snapshots(
            lambda: collect_local_state(engine, ema),
            interval_steps=1,
            max_snapshots=1,
            write_back=engine.load_scalar_state,
        )
        self._lr_scale = 1.0

    @property
    def step(self) -> int | None:
        """The step after which the state was copied; None before the first copy."""
        return self._snapshots.steps[-1] if self._snapshots.steps else None

    def take_snapshot(self, step: int) -> None:
        """Copy the present state, which is that after `step`."""
        self._snapshots.take_snapshot(step)
        # Finish the copy before the optimizer writes.
        self._snapshots.read_snapshot(step)
        self._lr_scale = self._recovery.state.lr_scale

    def drop_snapshot(self) -> None:
        """Forget the state, as after a rollback to an earlier one."""
        if self.step is not None:
            self._snapshots.drop_snapshot(self.step)

    def find_finite_step(self) -> int | None:
        """Step of the state if it is finite on every rank; None if it is not, or there is none. Collective."""
        if self.step is None:
            return None
        # Bad on any rank counts: all ranks restore the same step.
        return None if gather_object(self._snapshots.find_nonfinite(self.step)) else self.step

    def restore_snapshot(self, step: int) -> None:
        """Roll the run back to the state of `step`, with the guard's state. Collective.

        Later log lines, checkpoints and snapshots are removed, because they are results of the fault.
        """
        recovery = self._recovery
        recovery.engine.drop_optimizer_state(self._snapshots.restore_snapshot(step))
        recovery.state.lr_scale = self._lr_scale
        for later in [held_step for held_step in recovery.snapshots.steps if held_step > step]:
            recovery.snapshots.drop_snapshot(later)
        # The next failed step needs a state to return to, and the later ones are gone.
        recovery.snapshots.take_snapshot(step)
        recovery.files.rewind_logs_and_checkpoints(step, is_new_trajectory=True)
