"""Checks of healthy steps in any training loop: preflight at the first step, module statistics, loss spikes.

None of these changes a step, except that an attention backend that the preflight finds wrong is switched off.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dit_lora.config.ladder import LoopConfig
from dit_lora.errors import DitLoraError
from dit_lora.files import append_line
from dit_lora.guard.attach.accelerator_adapter import Host
from dit_lora.guard.attach.calls.outermost_calls import OutermostCall, leave, listen
from dit_lora.guard.attach.watched_models import WatchedModels
from dit_lora.guard.attention_backends import AttentionCall, recorded_calls
from dit_lora.guard.checks import (
    attention_backends,
    check_base_weights,
    gradients_reach,
    wrong_backends,
)
from dit_lora.guard.event import Event, kernel_event
from dit_lora.guard.monitor import Monitor
from dit_lora.guard.spikes import SpikeDetector
from dit_lora.guard.switches import attention_switches
from dit_lora.numerics.dtensors import local

STATISTICS = "statistics.jsonl"
LOOKS = ("preflight", "monitor_every", "spike_threshold")
Parameters = Mapping[str, nn.Parameter]


class Looks:
    """The optional checks of healthy steps. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        host: Host,
        watched: WatchedModels,
        config: LoopConfig,
        folder: Path | None,
        *,
        guard_id: str,
        write: Callable[[Event], None],
    ) -> None:
        if config.monitor_every and folder is None:
            raise DitLoraError(
                "Guard: monitor_every writes statistics of modules to a folder, and none was given; give folder="
            )
        enabled = [name for name in LOOKS if getattr(config, name)]
        self.is_wanted = bool(enabled)
        """False if none of these checks is enabled."""
        if enabled and host.under_deepspeed:
            raise DitLoraError(
                f"Guard: DeepSpeed's engine takes steps by itself, so there is no {', '.join(enabled)} under it; "
                "leave it out"
            )
        self._host = host
        self._watched = watched
        self._every = config.monitor_every
        self._folder = folder
        self._id = guard_id
        self._write = write
        self._monitor: Monitor | None = None
        """The monitor of the current step if it gets statistics, from its first call until the next step begins."""
        self._hooks = ExitStack()
        self._has_gradients = False
        self._updated = 0
        """The step whose update is still to be measured, since several optimizers may make it. 0 for none."""
        self._written = 0
        """The last step whose statistics were written."""
        self._spikes: SpikeDetector | None = None
        if config.spike_threshold is not None:
            self._spikes = SpikeDetector(
                window=config.spike_window, threshold=config.spike_threshold
            )
        self._norm: torch.Tensor | None = None
        self._wants_preflight = config.preflight
        self._attention: Counter[AttentionCall] = Counter()
        # Record attention calls until the first healthy step.
        if config.preflight:
            listen(self._around)

    def call_begins(self, step: int) -> None:
        """Hook the modules if this step gets statistics."""
        # This call belongs to the next step, so finish the measured one first.
        self.step_begins()
        is_due = self._every and step % self._every == 0
        # A closure may run several times within a step.
        if not is_due or self._monitor is not None or step == self._written:
            return
        # The watched models may have changed since the last measured step.
        self._monitor = Monitor(self._watched.together.model, every=1)
        self._hooks.enter_context(self._monitor.watching())

    def gradients(self, parameters: Parameters) -> None:
        """Measure the gradients before clipping, once per step."""
        if self._monitor is not None and not self._has_gradients:
            self._monitor.gradients()
            self._has_gradients = True
        if self._spikes is not None and self._norm is None:
            self._norm = self._norm_of([p.grad for p in parameters.values() if p.grad is not None])

    def healthy(
        self, step: int, optimizer: Any, parameters: Parameters, losses: Sequence[torch.Tensor]
    ) -> None:
        """Check a step that is about to be taken. Collective."""
        if self._wants_preflight:
            self._preflight(step, optimizer, parameters)
        if self._spikes is not None:
            self._observe(self._spikes, step, losses)
        self._norm = None
        # With several optimizers, the first one ends the forward passes and starts the update.
        if self._monitor is not None and not self._updated:
            self._hooks.close()
            self._monitor.before_update()
            self._updated = step

    def left_out(self) -> None:
        """Discard the measurements of a failed step."""
        self._norm = None
        self._drop()

    def step_begins(self) -> None:
        """Write the statistics of the previous step, whose last optimizer has stepped. Collective."""
        if not self._updated:
            return
        monitor, step = self._monitor, self._updated
        self._written = step
        assert monitor is not None  # it has looked at what is updated
        monitor.after_update()
        modules, hidden = monitor.collect(), monitor.hidden_infinities()
        self._drop()
        if modules and self._host.rank == 0 and self._folder is not None:
            line = {"step": step, "guard": self._id, "modules": modules}
            self._folder.mkdir(parents=True, exist_ok=True)
            append_line(self._folder / STATISTICS, json.dumps(line))
        if hidden:
            names = ", ".join(hidden[:5]) + (f" and {len(hidden) - 5} more" if hidden[5:] else "")
            message = f"the step is finite, but the output of {names} is not: something hides it"
            self._report(step, "hidden_infinity", message, cause="precision", module=hidden[0])

    def end(self) -> None:
        leave(self._around)
        self.step_begins()
        self._drop()

    @contextmanager
    def _around(self, call: OutermostCall) -> Iterator[None]:
        with recorded_calls() as calls:
            yield
        self._attention += calls

    def _drop(self) -> None:
        self._hooks.close()
        self._monitor, self._has_gradients, self._updated = None, False, 0

    def _norm_of(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Norm of all gradients over all ranks, as an fp32 scalar on the device."""
        if not gradients:
            return torch.zeros((), device=self._host.device)
        parts = [local(gradient) for gradient in gradients]
        # A model may be spread over several devices.
        norms = [norm.to(self._host.device).float() for norm in torch._foreach_norm(parts, 2)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if not any(isinstance(gradient, DTensor) for gradient in gradients):
            return norm
        # Ranks hold shards: add their squared norms.
        squares = norm.double().square()
        torch.distributed.all_reduce(squares)
        return squares.sqrt().float()

    def _observe(self, spikes: SpikeDetector, step: int, losses: Sequence[torch.Tensor]) -> None:
        device = self._host.device
        means = [loss.detach().float().mean().to(device) for loss in losses]
        # (2,): sum and number of losses, so that one all-reduce gives the mean over ranks.
        sum_and_count = torch.stack(
            [
                sum(means, torch.zeros((), device=device)),
                torch.tensor(float(len(means)), device=device),
            ]
        )
        total, count = self._host.summed(sum_and_count)  # over micro-batches and ranks
        series = {"loss": total / count} if count else {}
        if self._norm is not None:
            series["grad_norm"] = float(self._norm)
        for name, value in series.items():
            spike = spikes.observe(name, value)
            if spike is not None:
                self._report(step, "spike", spike.words)

    def _preflight(self, step: int, optimizer: Any, parameters: Parameters) -> None:
        """Check the first healthy step. Each failed check is logged; none stops the loop. Collective."""
        start_s = time.perf_counter()
        self._wants_preflight = False
        leave(self._around)
        # With several optimizers, each has its own steps, and gradients only for these.
        optimizer_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = [(name, p) for name, p in parameters.items() if id(p) in optimizer_ids]
        attention, _ = attention_backends(self._attention, self._host.device)
        self._attention.clear()
        findings = [
            *check_base_weights(self._watched.together.model),
            gradients_reach(trained),
            *attention,
        ]
        for finding in findings:
            if not finding.ok:
                self._report(step, "preflight", f"{finding.check}: {finding.words}")
        self._switch_off(step, wrong_backends(attention))
        duration_s = time.perf_counter() - start_s
        self._say(f"guard: {len(findings)} checks at the first healthy step, {duration_s:.1f} s")

    def _switch_off(self, step: int, wrong: list[str]) -> None:
        """Switch off on all ranks the backends that are wrong on any rank. Collective."""
        fallbacks = {fallback.name: fallback for fallback in attention_switches()}
        # Sorted, so that all ranks switch off and report in the same order.
        for backend in sorted(set(self._host.gathered(wrong))):
            name = f"attention:{backend}"
            if name not in fallbacks or name in self._watched.switched_off:
                continue  # `math`, which cannot be switched off, or off already
            fallbacks[name].turn_off()
            self._watched.switched_off.add(name)
            message = (
                f"{name} differs from fp64 at this model's own calls; switched off for this run"
            )
            event = kernel_event(step, "preflight", message, name, cause="attention_backend")
            self._write(replace(event, facts={"guard": self._id}))
            self._say(f"guard: step {step}: {message}")

    def _report(
        self, step: int, kind: str, words: str, cause: str = "unknown", **facts: str
    ) -> None:
        """Log and write an observation about a healthy step, on which no action is taken."""
        diagnosis = {"cause": cause, "words": words, **facts}
        self._write(Event(step, kind, diagnosis, facts={"guard": self._id}))
        self._say(f"guard: step {step}: {words}")

    def _say(self, words: str) -> None:
        self._host.say(words)
