"""Choose the recovery action for a failed step, within the limits of `guard.max_skips` and `guard.max_rollbacks`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dit_lora.config.ladder import LadderConfig
from dit_lora.guard.diagnosis import Diagnosis

# Data that is stored bad will fail again; another noise, timestep or position in the run will not.
_STORED_DATA_CAUSES = ("data", "labels")
# Causes for which every rank fails in the same way, and no sample is the cause.
STATE_CAUSES = ("weights", "optimizer", "learning_rate")
_COMPONENT_CAUSES = ("kernel", "attention_backend")


@dataclass(frozen=True)
class Action:
    """The recovery action for a failed step: chosen by the policy, and completed by the loop that carries it out."""

    kind: str
    """`retry`, `skip`, `quarantine`, `fallback`, `rollback` or `stop`; `report` if a loop can do nothing."""
    samples: tuple[str, ...] = ()
    """Samples to exclude. A `skip` without samples skips the whole step, since no sample is at fault."""
    fallbacks: tuple[str, ...] = ()
    should_lower_lr: bool = False
    replaced_kind: str = ""
    """The kind that was chosen, if the loop does not support it."""
    reason: str = ""
    """Reasons for not continuing, for `stop`."""
    description: str = ""
    """What was done, appended to the step and its kind in the message."""
    notes: Sequence[str] = ()
    """Further lines of the message."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Additional keys of the events."""
    restored_step: int | None = None
    """The step whose state the loop continues from; None if the state was not restored."""
    should_log: bool = True


@dataclass
class Policy:
    """Chooses the recovery action for a failed step. Its counts belong to a run and are saved in checkpoints."""

    config: LadderConfig
    skips: int = 0
    rollbacks: int = 0
    last_rollback_step: int = 0
    """The failed step that led to the last rollback."""

    def choose(self, step: int, diagnoses: Sequence[Diagnosis], previously_skipped: Sequence[str]) -> Action:
        """Choose and count the first action of `guard.on_nonfinite` that fits every diagnosis of a failed step."""
        causes: set[str] = {diagnosis.cause for diagnosis in diagnoses}
        reasons: list[str] = []
        # The user's order decides: take the first action that fits every cause.
        for action_kind in self.config.on_nonfinite:
            if action_kind == "stop":
                break
            action = self._match_action(action_kind, step, diagnoses, causes, previously_skipped)
            if isinstance(action, Action):
                if action.kind in ("retry", "skip", "quarantine"):
                    self.skips += 1
                if action.kind == "rollback":
                    self.rollbacks += 1
                    self.last_rollback_step = step
                return action
            if action:
                reasons.append(action)
        actions = ", ".join(self.config.on_nonfinite)
        reason = "; ".join(dict.fromkeys(reasons))
        return Action("stop", reason=reason or f"no rung of guard.on_nonfinite [{actions}] fits")

    def _match_action(
        self,
        action_kind: str,
        step: int,
        diagnoses: Sequence[Diagnosis],
        causes: set[str],
        previously_skipped: Sequence[str],
    ) -> Action | str:
        """Build the recovery action of this kind, or the reason why it does not fit the failed step.

        An empty string means that it never applies here.
        """
        # Nothing that a run can do repairs a rank that computes wrong values.
        faulty_ranks = [v for v in diagnoses if v.cause == "rank"]
        if faulty_ranks:
            return f"what else this run would compute on rank {faulty_ranks[0].rank} is not to be trusted"
        # With several causes, handle state first, then switches, then samples; a remaining cause fails again.
        if causes & set(STATE_CAUSES):
            return self._match_rollback(step, diagnoses) if action_kind == "rollback" else ""
        if causes & set(_COMPONENT_CAUSES):
            fallbacks = tuple(sorted({v.switch for v in diagnoses if v.switch}))
            return Action("fallback", fallbacks=fallbacks) if action_kind == "fallback" else ""
        # The remaining causes lie in samples, in noise, or in chance.
        if action_kind not in ("skip", "quarantine"):
            return ""
        # Retries count too: otherwise a run on an unreliable machine would retry forever.
        if self.skips >= self.config.max_skips:
            return f"guard.max_skips={self.config.max_skips} is used up"
        # Nothing has to be excluded: repeat the step unchanged.
        if causes == {"transient"}:
            return Action("retry")
        # Each sample once, in order; a set would order them differently in each run.
        samples = tuple(dict.fromkeys(s for v in diagnoses for s in v.sample_ids))
        # If no sample is the cause, only the whole step can be skipped.
        if not samples:
            return Action("skip") if action_kind == "skip" and "step" in causes else ""
        bad_as_stored = {s for v in diagnoses if v.cause in _STORED_DATA_CAUSES for s in v.sample_ids}
        # A failure that needs particular noise is the sample's fault if another sample is healthy with that noise. If
        # such a sample was skipped before, it is the cause, even if its stored data is good.
        with_noise = [v for v in diagnoses if v.cause == "inputs"]
        at_fault = [v for v in with_noise if v.evidence.get("control_with_the_same_draws") == "healthy"]
        repeated = {s for v in at_fault for s in v.sample_ids} & {*previously_skipped}
        lasting = tuple(s for s in samples if s in bad_as_stored or s in repeated)
        if action_kind == "quarantine":
            return Action(action_kind, samples=lasting) if lasting else ""
        # A sample that will fail again is left to `quarantine`, even if `skip` comes first.
        if lasting and "quarantine" in self.config.on_nonfinite:
            return ""
        return Action(action_kind, samples=lasting or samples)

    def _match_rollback(self, step: int, diagnoses: Sequence[Diagnosis]) -> Action | str:
        if self.rollbacks >= self.config.max_rollbacks:
            return f"guard.max_rollbacks={self.config.max_rollbacks} is used up"
        # Restoring trained weights does not repair a frozen one.
        if any(v.cause == "weights" and v.evidence.get("frozen") for v in diagnoses):
            return "a snapshot does not hold the frozen weights"
        if any("weight_decay" in v.evidence for v in diagnoses):
            return "no snapshot helps: lower optim.weight_decay, or the learning rate that it is multiplied by"
        # Steps repeat bit for bit, so a failure that returns at the same step is not a random memory error.
        is_repeated = step == self.last_rollback_step
        if is_repeated and any(v.evidence.get("ranks") for v in diagnoses):
            return "the ranks differ again after a rollback: leave that machine out"
        return Action("rollback", should_lower_lr=is_repeated or any(v.cause == "learning_rate" for v in diagnoses))

    def state_dict(self) -> dict[str, int]:
        """Counts of skips and rollbacks for a checkpoint; `Policy(config, **state)` continues with them."""
        return {"skips": self.skips, "rollbacks": self.rollbacks, "last_rollback_step": self.last_rollback_step}
