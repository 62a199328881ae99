"""The guard as a plugin: two lines make an accelerate loop safe that somebody else wrote.

    guard = dit_lora.Guard.attach(accelerator, model, optimizer)     # after accelerator.prepare

The loop stays as it is. Its `accelerator.backward`, `accelerator.clip_grad_norm_` and `optimizer.step` are watched;
a step whose loss or gradient is not finite on any rank is not taken, and `lr_scheduler.step` after it does nothing.
Only then the micro-batch is replayed, and the cause named.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, gather_object
from torch import nn

from dit_lora.config import LadderConfig
from dit_lora.errors import DitLoraError, listed
from dit_lora.numerics.bisect import diagnose
from dit_lora.numerics.captured import Recorder
from dit_lora.numerics.gate import NonFiniteError, weights_are_bad
from dit_lora.numerics.loop_state import LoopState
from dit_lora.numerics.patches import Patches
from dit_lora.numerics.policy import Action, Policy
from dit_lora.numerics.replay import MicroBatch
from dit_lora.numerics.shards import local
from dit_lora.numerics.state import bad_state, weight_peak
from dit_lora.numerics.suspects import Suspects
from dit_lora.numerics.switches import all_switches, find_switch
from dit_lora.numerics.verdict import Verdict

_LOG = logging.getLogger("dit_lora")
# Below this a gradient scaler has halved itself 16 times from Accelerate's start at 2**16.
_SCALE_FLOOR = 1.0
# Steps over which `max_skips` counts: a bad sample comes back in every epoch of a loop that is not ours.
_WINDOW = 100


class Guard:
    """Watches one model and one optimizer of an accelerate loop. Make it with `attach`."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        *,
        config: LadderConfig,
        folder: Path | None,
    ) -> None:
        self.accelerator = accelerator
        self.optimizer = optimizer
        self.config = config
        self.folder = folder
        self.step = 1
        """The optimizer step under way, counted from 1."""
        self.events: list[dict[str, Any]] = []
        self._model = accelerator.unwrap_model(model)
        self._policy = Policy(config)
        self._patches = Patches()
        self._recorder = Recorder(self._model, self._ids_of_call)
        self._state = LoopState(self._model, optimizer, every=config.snapshot_every)
        self._named: tuple[str, ...] = ()
        self._warned = False
        self._bad_losses: list[torch.Tensor] = []
        self._bad_gradients: torch.Tensor | None = None
        self._zero_gradients: torch.Tensor | None = None
        self._skipped_steps: list[int] = []
        self._bad_weights: torch.Tensor | None = None
        self._tripped = False
        self.suspects = Suspects(
            model=self._model,
            optimizer_state=lambda: self._state.optimizer_tensors().items(),
            switches=all_switches(self._model),
            start_peak=weight_peak(self._state.trainables().values()),
        )

    @classmethod
    def attach(
        cls,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        *,
        lr_scheduler: Any = None,
        ema: Any = None,
        config: LadderConfig | None = None,
        folder: str | Path | None = None,
    ) -> "Guard":
        """Guard a loop whose model and optimizer `accelerator.prepare` has returned.

        A learning rate scheduler that Accelerate prepared needs nothing; give another one, and an EMA with a
        `step` method, so that a tripped step does not advance them either. `folder` gets events.jsonl. In a
        loop that is not ours a skipped step is gone: its other samples wait for the next epoch, and
        `quarantine` cannot take a sample out of the loop's dataset: it skips, and names it.
        """
        guard = cls(
            accelerator,
            model,
            optimizer,
            config=config or LadderConfig(),
            folder=Path(folder) if folder is not None else None,
        )
        guard._require_wide_weights()
        guard._watch(lr_scheduler, ema)
        return guard

    @contextmanager
    def microbatch(
        self, ids: Sequence[str], generator: torch.Generator | None = None
    ) -> Iterator[None]:
        """Name the samples of the forward passes within, in the order of their rows.

        A replay puts `generator` back where it is now; torch's own are put back anyway. An index that no
        embedding table of the model has raises `DitLoraError` with the sample's name (on a CPU; a GPU ends
        the process).
        """
        self._named, self._recorder.generator = tuple(ids), generator
        try:
            yield
        except IndexError as error:
            offenders = self._recorder.out_of_range()
            if not offenders:
                raise
            raise DitLoraError(
                listed("no table of the model has these indices", offenders)
            ) from error
        finally:
            self._named, self._recorder.generator = (), None

    def detach(self) -> None:
        """Give the loop its own methods back."""
        self._recorder.stop()
        self._patches.undo()

    def _watch(self, lr_scheduler: Any, ema: Any) -> None:
        self._patches.method(self.accelerator, "backward", self._backward)
        self._patches.method(self.accelerator, "end_training", self._end)
        self._patches.method(self.accelerator, "clip_grad_norm_", self._clip)
        self._patches.method(self.accelerator, "clip_grad_value_", self._clip)
        self._patches.method(self.optimizer, "step", self._optimizer_step)
        for owner in (lr_scheduler, ema):
            if owner is not None:
                self._patches.gated_step(owner, lambda: self._tripped)
        self._state.ema = ema
        own = [lr_scheduler] if lr_scheduler else []
        self._state.schedules = [*self.accelerator._schedulers, *own]
        self._recorder.start()
        if not self._under_deepspeed:  # its optimizer state is the engine's
            self._state.take(0)

    def _require_wide_weights(self) -> None:
        """fp16 weights cannot be trained: AdamW's eps of 1e-8 is 0 there, and 0 / 0 is NaN."""
        dtypes = {name: p.dtype for name, p in self._state.trainables().items()}
        if torch.float16 in dtypes.values():
            names = [name for name, dtype in dtypes.items() if dtype is torch.float16]
            raise DitLoraError(
                listed(
                    f"{len(names)} trained parameters are fp16, where AdamW turns a gradient of 0 into NaN; cast "
                    "them to fp32 before accelerator.prepare",
                    names[:10],
                )
            )
        if torch.bfloat16 in dtypes.values():
            _LOG.warning(
                "guard: trained parameters are bf16: small updates round to nothing; use fp32"
            )

    def _end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        left = len(self._skipped_steps)
        if left and self.accelerator.is_main_process:
            _LOG.warning("guard: %d of %d optimizer steps were not taken", left, self.step - 1)
        return original(*args, **kwargs)

    def _backward(self, original: Callable[..., Any], loss: torch.Tensor, **kwargs: Any) -> Any:
        bad = ~torch.isfinite(loss.detach()).all()
        self._bad_losses.append(bad)
        if self._under_deepspeed and self._any_rank(bad):
            # Its backward also steps: this is the last moment, and costs a read by the host.
            self._tripped = True
            self._recover("non_finite_loss")
            return None
        result = original(loss, **kwargs)
        if self._under_deepspeed:
            self._tripped = False
            self._next_step()
        return result

    @property
    def _under_deepspeed(self) -> bool:
        return self.accelerator.distributed_type is DistributedType.DEEPSPEED

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._note_gradients()
        return original(*args, **kwargs)

    def _note_gradients(self) -> None:
        """Before clipping, once a step. With a gradient scaler they are scaled, and its own check decides."""
        if self.accelerator.scaler is not None or not self.accelerator.sync_gradients:
            return
        if self._under_deepspeed:  # its engine holds the gradients, and has used them
            return
        if self._bad_gradients is None:
            gradients = [
                local(p.grad) for p in self._state.trainables().values() if p.grad is not None
            ]
            if not gradients:
                self._bad_gradients = torch.tensor(False, device=self.accelerator.device)
                self._zero_gradients = ~self._bad_gradients
                return
            norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients)])
            self._bad_gradients = ~torch.isfinite(norms).all()
            self._zero_gradients = (norms == 0).all()

    def _optimizer_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.accelerator.sync_gradients or self._under_deepspeed:
            return original(*args, **kwargs)
        self._note_gradients()
        kind = self._tripped_by()
        self._tripped = kind is not None
        if kind is not None:
            self._recover(kind)
            return None
        self._state.snapshots.before_update()
        result = original(*args, **kwargs)
        self._check_scaler()
        self._bad_weights = weights_are_bad(self.optimizer)
        due = self._state.snapshots.due(self.step)
        if due or self._state.ema is not None:  # an average that took in NaN has it for good
            self.require_finite()
        self._next_step()
        if due and not self._tripped:
            self._state.take(self.step - 1)
        return result

    def _tripped_by(self) -> str | None:
        """What is wrong with this step on any rank: one all-reduce and one read by the host."""
        false = torch.tensor(False, device=self.accelerator.device)
        losses = torch.stack(self._bad_losses).any() if self._bad_losses else false
        weights = false if self._bad_weights is None else self._bad_weights
        gradients = false if self._bad_gradients is None else self._bad_gradients
        zero = false if self._zero_gradients is None else self._zero_gradients
        flags = torch.stack([losses, weights, gradients, zero]).float()
        if self.accelerator.num_processes > 1:
            flags = self.accelerator.reduce(flags, reduction="sum")
        bad_losses, bad_weights, bad_gradients, no_gradient = (flags > 0).tolist()
        if bad_weights:
            return "non_finite_weights"
        if bad_losses:
            return "non_finite_loss"
        if bad_gradients:
            return "non_finite_gradient"
        return "zero_gradient" if no_gradient else None

    def _any_rank(self, flag: torch.Tensor) -> bool:
        return bool(self.accelerator.reduce(flag.float(), reduction="sum"))

    def _check_scaler(self) -> None:
        """A scaler that halves itself for ever never trains again and never says so."""
        scaler = self.accelerator.scaler
        if scaler is None or not self.optimizer.step_was_skipped:
            return
        if (scale := scaler.get_scale()) < _SCALE_FLOOR:
            raise NonFiniteError(
                f"step {self.step}: gradients overflow fp16 at every loss scale down to {scale:g}; use bf16, or "
                "a lower learning rate",
                {"step": self.step, "kind": "loss_scale", "action": "stop"},
            )

    def require_finite(self) -> None:
        """Raise if a trained weight is not finite on any rank; call it before saving what was trained."""
        if self._any_rank(weights_are_bad(self.optimizer)):
            self._tripped = True
            self._recover("non_finite_weights")

    def _recover(self, kind: str) -> None:
        """Name the cause and act; raises `NonFiniteError` on every rank if nothing fits."""
        began = time.perf_counter()
        verdicts = self._agreed_verdicts(kind)
        recent = [step for step in self._skipped_steps if step > self.step - _WINDOW]
        self._policy.skips = len(recent)
        action = self._feasible(self._policy.choose(self.step, verdicts, self._skipped()))
        self._forget_gradients()
        lines = [f"{', '.join(v.sample_ids) or 'rank ' + str(v.rank)}: {v.words}" for v in verdicts]
        for verdict in verdicts:
            self._write(verdict, kind, action, time.perf_counter() - began)
        head = f"guard: step {self.step}: {kind.replace('_', ' ')}"
        if action.kind == "stop":
            state = "not to be used" if kind == "non_finite_weights" else "those of the step before"
            message = f"{head}; the weights are {state}; stopped: {action.why}"
            raise NonFiniteError(listed(message, lines), self.events[-1])
        if action.kind == "skip":
            self._skipped_steps.append(self.step)
        done = self._act(action)
        if self.accelerator.is_main_process:
            _LOG.warning("%s", listed(f"{head}; {done}", lines))
        self._next_step()

    def _agreed_verdicts(self, kind: str) -> list[Verdict]:
        rank = self.accelerator.process_index
        batches = [
            call.micro_batch(self._model, step=self.step, micro_step=number, rank=rank)
            for number, call in enumerate(self._recorder.calls)
        ]
        self._recorder.stop()  # replays are not to be recorded
        found = [diagnose(batch, self.suspects, kind=kind) for batch in batches]
        if verdict := bad_state(_nothing_run(self.step, rank), self.suspects):
            found = [verdict]
        self._recorder.start()
        verdicts = gather_object(found)
        telling = [verdict for verdict in verdicts if verdict.cause != "transient"]
        return telling or verdicts[:1] or [_unseen(self.step, rank)]

    def _skipped(self) -> list[str]:
        return [sample for event in self.events for sample in event["sample_ids"]]

    def _feasible(self, action: Action) -> Action:
        if action.kind == "rollback" and not self._state.forget_bad():
            return Action("stop", why="no snapshot that is finite is held")
        # Which samples come next is the loop's own affair: all that can be done here is not to step.
        samples_only = action.kind in ("retry", "quarantine")
        return replace(action, kind="skip") if samples_only else action

    def _act(self, action: Action) -> str:
        if action.kind == "fallback":
            for name in action.switches:
                find_switch(list(self.suspects.switches), name).turn_off()
            return f"{', '.join(action.switches)} switched off for this run; the step was not taken"
        if action.kind == "rollback":
            return self._roll_back(action)
        return "the step was not taken"

    def _roll_back(self, action: Action) -> str:
        target = self._state.snapshots.steps[-1]
        self._state.restore(target)
        self._bad_weights = None
        if action.lower_lr:
            self._state.lower_rates(self.config.rollback_lr)
        return f"weights and optimizer are those of step {target}"

    def _write(self, verdict: Verdict, kind: str, action: Action, seconds: float) -> None:
        event = {
            "step": self.step,
            "micro_step": verdict.micro_step,
            "rank": verdict.rank,
            "kind": kind,
            "sample_ids": list(verdict.sample_ids),
            "verdict": verdict.record(),
            "action": action.kind,
            "seconds": round(seconds, 3),
        }
        self.events.append(event)
        if self.folder is not None and self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def _forget_gradients(self) -> None:
        for parameter in self._state.trainables().values():
            parameter.grad = None

    def _next_step(self) -> None:
        if isinstance(self.optimizer, AcceleratedOptimizer) and self.accelerator.scaler is None:
            self.optimizer._is_overflow = self._tripped  # Accelerate's word for a step not taken
        self.step += int(self.accelerator.sync_gradients)  # DeepSpeed's micro-steps count as one
        self._recorder.calls.clear()
        self._bad_losses.clear()
        self._bad_gradients = self._zero_gradients = None

    def _ids_of_call(self, number: int, count: int) -> tuple[str, ...]:
        if len(self._named) == count:
            return self._named
        if self._named and not self._warned:
            self._warned = True
            _LOG.warning(
                "guard.microbatch: %d ids for %d rows; rows are numbered", len(self._named), count
            )
        return tuple(f"sample {row} of micro-batch {number}" for row in range(count))


def _nothing_run(step: int, rank: int) -> MicroBatch:
    """Stands for a step between whose bounds only the state is in question."""

    def refused(*_: Any) -> Any:
        raise DitLoraError("there is nothing to replay")

    return MicroBatch((), step, 0, rank, {}, forward=refused, single=refused)


def _unseen(step: int, rank: int) -> Verdict:
    words = "the model was not called between two optimizer steps, so there is nothing to replay"
    return Verdict("unknown", words, step, rank)
