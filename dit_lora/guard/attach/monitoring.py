"""Checks of healthy steps in any training loop: preflight at the first step, module statistics, spikes, gradients.

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

from dit_lora.config.recovery_settings import LoopConfig
from dit_lora.errors import DitLoraError
from dit_lora.files import append_line
from dit_lora.guard.attach.accelerator_adapter import LoopProcessContext
from dit_lora.guard.attach.calls.gradient_check import GradientBundleWriter, LoopGradientCheck
from dit_lora.guard.attach.calls.outermost_calls import OutermostCall, add_listener, remove_listener
from dit_lora.guard.attach.guard_json import STATISTICS_FILE
from dit_lora.guard.attach.watched_models import WatchedModels
from dit_lora.guard.attention_backends import AttentionCall, record_attention_calls
from dit_lora.guard.checks import (
    check_attention_backends,
    check_base_weights,
    check_gradient_coverage,
    find_wrong_backends,
)
from dit_lora.guard.diagnosis import Event, make_hidden_infinity_event, make_kernel_event, make_observation_event
from dit_lora.guard.fallbacks import list_attention_fallbacks
from dit_lora.guard.monitor import Monitor
from dit_lora.guard.spikes import SpikeDetector
from dit_lora.numerics.dtensors import combine_shard_norms, get_local_tensor

OPTIONAL_CHECKS = ("preflight", "monitor_every", "spike_threshold", "gradient_every")
Parameters = Mapping[str, nn.Parameter]


class HealthyStepChecks:
    """Optional checks of healthy steps: statistics, spikes, preflight checks.

    Every rank calls the same methods in the same order.
    """

    def __init__(
        self,
        host: LoopProcessContext,
        watched: WatchedModels,
        config: LoopConfig,
        folder: Path | None,
        *,
        guard_id: str,
        write: Callable[[Event], None],
        write_gradient_bundle: GradientBundleWriter,
    ) -> None:
        if config.monitor_every and folder is None:
            raise DitLoraError("Guard: monitor_every needs folder=, where it writes statistics of modules")
        enabled = [name for name in OPTIONAL_CHECKS if getattr(config, name)]
        self.is_enabled = bool(enabled)
        """False if none of these checks is enabled."""
        if enabled and host.uses_deepspeed:
            raise DitLoraError(
                f"Guard: DeepSpeed's engine takes steps by itself, so {', '.join(enabled)} is not available; remove it"
            )
        self._host = host
        self._watched = watched
        self._interval_steps = config.monitor_every
        self._folder = folder
        self._guard_id = guard_id
        self._write = write
        self._monitor: Monitor | None = None
        """The monitor of the current step if it gets statistics, from its first call until the next step begins."""
        self._hooks = ExitStack()
        self._has_gradients = False
        self._measured_step = 0
        """The step whose update is still to be measured, since several optimizers may make it. 0 for none."""
        self._last_written_step = 0
        """The last step whose statistics were written."""
        self._spikes: SpikeDetector | None = None
        if config.spike_threshold is not None:
            self._spikes = SpikeDetector(window=config.spike_window, threshold=config.spike_threshold)
        self.gradient_check: LoopGradientCheck | None = None
        if config.gradient_every:
            self.gradient_check = LoopGradientCheck(host, watched, config.gradient_every, write, write_gradient_bundle)
        self._gradient_norm: torch.Tensor | None = None
        self._should_run_preflight = config.preflight
        self._attention_calls: Counter[AttentionCall] = Counter()
        # Record attention calls until the first healthy step.
        if config.preflight:
            add_listener(self._record_attention)

    def before_call(self, step: int) -> None:
        """Before a model call, finish the previous step's statistics and hook the modules if this step gets some."""
        # This call belongs to the next step, so finish the measured one first.
        self.before_step()
        is_due = self._interval_steps and step % self._interval_steps == 0
        # A closure may run several times within a step.
        if not is_due or self._monitor is not None or step == self._last_written_step:
            return
        # The watched models may have changed since the last measured step.
        self._monitor = Monitor(self._watched.joint_context.model, interval_steps=1)
        self._hooks.enter_context(self._monitor.record_outputs())

    def measure_gradient_norms(self, parameters: Parameters) -> None:
        """Measure the gradient norms of a step, once and before clipping."""
        if self._monitor is not None and not self._has_gradients:
            self._monitor.record_gradient_norms()
            self._has_gradients = True
        if self._spikes is not None and self._gradient_norm is None:
            self._gradient_norm = self._compute_norm([p.grad for p in parameters.values() if p.grad is not None])

    def check_step(self, step: int, optimizer: Any, parameters: Parameters, losses: Sequence[torch.Tensor]) -> None:
        """Run the checks that are due on a healthy step before it is taken: preflight, spikes, statistics.

        Collective.
        """
        if self._should_run_preflight:
            self._run_preflight(step, optimizer, parameters)
        if self._spikes is not None:
            self._detect_metric_spikes(self._spikes, step, losses)
        self._gradient_norm = None
        # With several optimizers, the first one ends the forward passes and starts the update.
        if self._monitor is not None and not self._measured_step:
            self._hooks.close()
            self._monitor.before_update()
            self._measured_step = step

    def discard_step_statistics(self) -> None:
        """Discard the gradient norm and statistics measured in a failed step."""
        self._gradient_norm = None
        self._reset_step_statistics()

    def before_step(self) -> None:
        """Write the statistics of the previous step, once its last optimizer has stepped. Collective."""
        if not self._measured_step:
            return
        monitor, step = self._monitor, self._measured_step
        self._last_written_step = step
        assert monitor is not None  # it has looked at what is updated
        monitor.after_update()
        modules, hidden = monitor.collect_module_statistics(), monitor.find_hidden_infinities()
        self._reset_step_statistics()
        if modules and self._host.rank == 0 and self._folder is not None:
            line = {"step": step, "guard": self._guard_id, "modules": modules}
            self._folder.mkdir(parents=True, exist_ok=True)
            append_line(self._folder / STATISTICS_FILE, json.dumps(line))
        if hidden:
            self._report_guard_event(make_hidden_infinity_event(step, hidden))

    def close(self) -> None:
        remove_listener(self._record_attention)
        self.before_step()
        self._reset_step_statistics()

    @contextmanager
    def _record_attention(self, call: OutermostCall) -> Iterator[None]:
        with record_attention_calls() as calls:
            yield
        self._attention_calls += calls

    def _reset_step_statistics(self) -> None:
        self._hooks.close()
        self._monitor, self._has_gradients, self._measured_step = None, False, 0

    def _compute_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Norm of all gradients over all ranks, as an fp32 scalar on the device."""
        if not gradients:
            return torch.zeros((), device=self._host.device)
        parts = [get_local_tensor(gradient) for gradient in gradients]
        # A model may be spread over several devices.
        norms = [norm.to(self._host.device).float() for norm in torch._foreach_norm(parts, 2)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        is_sharded = any(isinstance(gradient, DTensor) for gradient in gradients)
        return combine_shard_norms(norm) if is_sharded else norm

    def _detect_metric_spikes(self, spikes: SpikeDetector, step: int, losses: Sequence[torch.Tensor]) -> None:
        device = self._host.device
        means = [loss.detach().float().mean().to(device) for loss in losses]
        # (2,): sum and number of losses, so that one all-reduce gives the mean over ranks.
        sum_and_count = torch.stack(
            [sum(means, torch.zeros((), device=device)), torch.tensor(float(len(means)), device=device)]
        )
        total, count = self._host.sum_flags(sum_and_count)  # over micro-batches and ranks
        series = {"loss": total / count} if count else {}
        if self._gradient_norm is not None:
            series["grad_norm"] = float(self._gradient_norm)
        for name, value in series.items():
            spike = spikes.add_value_and_detect(name, value)
            if spike is not None:
                self._report_guard_event(make_observation_event(step, "spike", spike.message))

    def _run_preflight(self, step: int, optimizer: Any, parameters: Parameters) -> None:
        """Run the preflight checks after the first healthy step.

        Each failed one is logged; none stops the loop. Collective.
        """
        start_s = time.perf_counter()
        self._should_run_preflight = False
        remove_listener(self._record_attention)
        # With several optimizers, each has its own steps, and gradients only for these.
        optimizer_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = [(name, p) for name, p in parameters.items() if id(p) in optimizer_ids]
        attention, _ = check_attention_backends(self._attention_calls, self._host.device)
        self._attention_calls.clear()
        findings = [
            *check_base_weights(self._watched.joint_context.model),
            check_gradient_coverage(trained),
            *attention,
        ]
        for finding in findings:
            if not finding.ok:
                self._report_guard_event(
                    make_observation_event(step, "preflight", f"{finding.check}: {finding.message}")
                )
        self._disable_backends(step, find_wrong_backends(attention))
        duration_s = time.perf_counter() - start_s
        self._host.log(f"guard: {len(findings)} checks at the first healthy step, {duration_s:.1f} s")

    def _disable_backends(self, step: int, wrong_backends: list[str]) -> None:
        """Disable attention backends on all ranks that are wrong on any rank. Collective."""
        fallbacks = {fallback.name: fallback for fallback in list_attention_fallbacks()}
        # Sorted, so that all ranks switch off and report in the same order.
        for backend in sorted(set(self._host.gather_objects(wrong_backends))):
            name = f"attention:{backend}"
            if name not in fallbacks or name in self._watched.disabled_names:
                continue  # `math`, which cannot be switched off, or off already
            fallbacks[name].disable()
            self._watched.disabled_names.add(name)
            message = f"{name} differs from fp64 at this model's own calls; switched off for this run"
            self._report_guard_event(make_kernel_event(step, "preflight", message, name, cause="attention_backend"))

    def _report_guard_event(self, event: Event) -> None:
        """Log an event and write it to events.jsonl."""
        self._write(replace(event, facts={"guard": self._guard_id}))
        self._host.log(f"guard: step {event.step}: {event.message}")
