"""Choose the rung of the ladder that answers a verdict, within budgets."""

from collections.abc import Sequence
from dataclasses import dataclass

from dit_lora.config.ladder import LadderConfig
from dit_lora.guard.verdict import Verdict

# Data that is bad where it is stored will be bad again; a draw of noise or timestep, or a place in the run, will not.
_FOR_GOOD = ("data", "labels")
_OF_STATE = ("weights", "optimizer", "learning_rate")
_OF_SWITCHES = ("kernel", "attention_backend")


@dataclass(frozen=True)
class Action:
    """The answer to a tripped step."""

    kind: str
    """`retry`, `skip`, `quarantine`, `fallback`, `rollback` or `stop`."""
    samples: tuple[str, ...] = ()
    """Samples that are left out. A `skip` without samples leaves the step out: none of them is at fault."""
    switches: tuple[str, ...] = ()
    lower_lr: bool = False
    instead_of: str = ""
    """The kind that was chosen, where a loop is not able to do that."""
    why: str = ""
    """Reasons against going on, for `stop`."""


@dataclass
class Policy:
    """Chooses an action; the counts are a run's, and go into its checkpoints."""

    config: LadderConfig
    skips: int = 0
    rollbacks: int = 0
    last_rollback_step: int = 0
    """The tripped step that the last rollback answered."""

    def choose(
        self, step: int, verdicts: Sequence[Verdict], skipped_before: Sequence[str]
    ) -> Action:
        """Return the first rung of `guard.on_nonfinite` that fits every cause, and count it."""
        causes: set[str] = {verdict.cause for verdict in verdicts}
        reasons: list[str] = []
        for rung in self.config.on_nonfinite:
            if rung == "stop":
                break
            action = self._try(rung, step, verdicts, causes, skipped_before)
            if isinstance(action, Action):
                return self._counted(action, step)
            if action:
                reasons.append(action)
        ladder = ", ".join(self.config.on_nonfinite)
        why = "; ".join(dict.fromkeys(reasons))
        return Action("stop", why=why or f"no rung of guard.on_nonfinite [{ladder}] fits")

    def _try(
        self,
        rung: str,
        step: int,
        verdicts: Sequence[Verdict],
        causes: set[str],
        skipped_before: Sequence[str],
    ) -> Action | str:
        """Return the rung's action, or why it does not fit, or an empty string where it is out of the question."""
        broken = [v for v in verdicts if v.cause == "rank"]
        if broken:
            return f"what else this run would compute on rank {broken[0].rank} is not to be trusted"
        # Two faults at once: state first, then switches, then samples; what is left trips again.
        if causes & set(_OF_STATE):
            return self._rollback(step, verdicts) if rung == "rollback" else ""
        if causes & set(_OF_SWITCHES):
            switches = tuple(sorted({v.switch for v in verdicts if v.switch}))
            return Action("fallback", switches=switches) if rung == "fallback" else ""
        if rung not in ("skip", "quarantine"):
            return ""
        # Retries count too: else a machine that fails now and then would go on for ever.
        if self.skips >= self.config.max_skips:
            return f"guard.max_skips={self.config.max_skips} is used up"
        # Nothing is to be left out: the step is taken again as it was.
        if causes == {"transient"}:
            return Action("retry")
        samples = tuple(dict.fromkeys(s for v in verdicts for s in v.sample_ids))
        # Where none is at fault, the step can only be left out as a whole.
        if not samples:
            return Action("skip") if rung == "skip" and "step" in causes else ""
        bad = {s for v in verdicts if v.cause in _FOR_GOOD for s in v.sample_ids}
        # A sample that was skipped before and is bad with other draws is at fault itself, though it is stored well.
        again = {s for v in verdicts if _is_the_samples(v) for s in v.sample_ids} & {
            *skipped_before
        }
        for_good = tuple(s for s in samples if s in bad or s in again)
        if rung == "quarantine":
            return Action(rung, samples=for_good) if for_good else ""
        if for_good and "quarantine" in self.config.on_nonfinite:
            return ""
        return Action(rung, samples=for_good or samples)

    def _rollback(self, step: int, verdicts: Sequence[Verdict]) -> Action | str:
        if self.rollbacks >= self.config.max_rollbacks:
            return f"guard.max_rollbacks={self.config.max_rollbacks} is used up"
        if any(v.cause == "weights" and v.evidence.get("frozen") for v in verdicts):
            return "a snapshot does not hold the frozen weights"
        if any("weight_decay" in v.evidence for v in verdicts):
            return "no snapshot helps: lower optim.weight_decay, or the learning rate that it is multiplied by"
        # Steps repeat bit for bit, so what comes back at the same step is no accident of the memory.
        again = step == self.last_rollback_step
        if again and any(v.evidence.get("ranks") for v in verdicts):
            return "the ranks differ again after a rollback: leave that machine out"
        return Action(
            "rollback", lower_lr=again or any(v.cause == "learning_rate" for v in verdicts)
        )

    def _counted(self, action: Action, step: int) -> Action:
        if action.kind in ("retry", "skip", "quarantine"):
            self.skips += 1
        if action.kind == "rollback":
            self.rollbacks += 1
            self.last_rollback_step = step
        return action

    def state(self) -> dict[str, int]:
        """Return counts for a checkpoint; `Policy(config, **state)` goes on with them."""
        return {
            "skips": self.skips,
            "rollbacks": self.rollbacks,
            "last_rollback_step": self.last_rollback_step,
        }


def _is_the_samples(verdict: Verdict) -> bool:
    """Return True if a fault that comes with some draws alone is the sample's: another is healthy with the same
    draws.
    """
    return (
        verdict.cause == "inputs"
        and verdict.evidence.get("control_with_the_same_draws") == "healthy"
    )
