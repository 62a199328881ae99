"""The settings of `benchmarks.step`: how each is put on a model, takes its steps, and is taken off again."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from accelerate import Accelerator

from benchmarks.step_models import Inputs, Model
from dit_lora.config.optim import GroupConfig, GroupsConfig, OptimConfig
from dit_lora.data.loading.batch import Batch
from dit_lora.fuse.api import fuse, unfuse
from dit_lora.fuse.gradient_norms import choose_norm_function
from dit_lora.fuse.patches import OPS, get_fusion
from dit_lora.guard.snapshots import Snapshots
from dit_lora.numerics.memory import get_available_bytes
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import RandomStreams
from dit_lora.training.choose_checkpointing import count_unallocated_bytes
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.execution.activation_checkpointing import (
    CheckpointingMode,
    set_checkpointing,
)
from dit_lora.training.execution.activations import advise_checkpointing, measure_activations
from dit_lora.training.loop import LoopCallbacks, TrainingLoopComponents, train
from dit_lora.training.optim.build import LearningRateSchedule
from dit_lora.training.recovery.monitoring import StepMonitor
from dit_lora.training.recovery.run_recovery import RunFailure
from dit_lora.training.session.determinism import use_deterministic_algorithms
from dit_lora.training.step import StepResult

_FP8 = "fp8"
_RATE, _CLIP = 1e-4, 1.0
TARGET = "target"
"""Key of the noise that a step's output is compared with, among a model's inputs."""


@dataclass(frozen=True)
class Setting:
    """One way to train."""

    name: str
    checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    fused: bool = False
    compiled: bool = False
    cudnn: bool = True
    """True where PyTorch may take cuDNN's attention."""
    guarded: bool = False
    """True where the step is that of `dit_lora.training.loop`, gate and all."""
    fp8: bool = False
    deterministic: bool = False
    """True for `train.deterministic`: PyTorch uses only deterministic algorithms."""

    @property
    def is_compiled_stock(self) -> bool:
        """True for what the best compiled setting is looked for among."""
        return self.compiled and not self.fused


SETTINGS = (
    Setting("example", "full"),
    Setting("ours", fused=True),
    Setting("stock, none", "none"),
    Setting("ours, guard", fused=True, guarded=True),
    Setting("stock, none, compiled", "none", compiled=True),
    Setting("ours, compiled", fused=True, compiled=True),
    Setting("ours, cuDNN off", fused=True, cudnn=False),
    *([Setting("ours, fp8", fused=True, fp8=True)] if _FP8 in OPS else []),
    Setting("ours, none", "none", fused=True),
    Setting("ours, selective", "selective", fused=True),
    Setting("ours, deterministic", fused=True, deterministic=True),
    Setting("example, compiled", "full", compiled=True),
)
"""The most telling first: a run that is cut short has them."""
EXAMPLE = SETTINGS[0]

OnStep = Callable[[int, float, float | None], None]
"""Called after each step with its number, its loss, and the seconds that the host took to launch it, where known."""


class Steps(Protocol):
    """One setting at work."""

    mode: CheckpointingMode
    reason: str
    """Why that checkpointing."""

    def take(self, first_step: int, last_step: int, on_step: OnStep) -> None:
        """Take these steps, the last one too."""


@contextmanager
def settled(
    model: Any, entry: Model, setting: Setting, batches: Sequence[Inputs], wait: Callable[[], None]
) -> Iterator[Steps]:
    """Yield the setting's steps over these batches; afterwards the model is as it was built."""
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(setting.cudnn and cudnn)
        with use_deterministic_algorithms(setting.deterministic):
            yield build_steps(model, entry, setting, batches, wait)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        _take_off(model, trained)


def build_steps(
    model: Any,
    entry: Model,
    setting: Setting,
    batches: Sequence[Inputs],
    wait: Callable[[], None],
    *,
    fuse_model: bool = True,
) -> Steps:
    """Put a setting on the model; `fuse_model` is False where another setting has already fused it."""
    device = next(model.parameters()).device
    if setting.fused and fuse_model:
        on_cpu = dict.fromkeys(entry.ops, "on")  # by themselves they need a GPU
        modes: dict[str, Any] = {} if device.type == "cuda" else on_cpu
        # The check of the first forwards is off: here the losses of the settings are compared.
        fuse(model, {**modes, **({_FP8: "on"} if setting.fp8 else {})}, check=False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    # As the scripts have it: the fused one, which the gate needs, is ours.
    with_fused: dict[str, Any] = {"fused": True} if setting.fused else {}
    groups = [{"params": parameters, "name": "adapter"}]
    optimizer = torch.optim.AdamW(groups, lr=_RATE, **with_fused)
    mode, description = _mode(model, setting, batches[0], optimizer)
    if setting.compiled:
        torch._dynamo.reset()
        for block in _blocks(model):
            backend = "inductor" if device.type == "cuda" else "aot_eager"
            block.compile(backend=backend, dynamic=False)
    set_checkpointing(model, mode)
    kind = _GuardedSteps if setting.guarded else _PlainSteps
    return kind(model, optimizer, batches, mode, description, wait)


def ops_used(model: Any) -> str:
    """Comma-separated names of the ops that replaced something in a fused model."""
    fusion = get_fusion(model)
    return ", ".join(fusion.get_active_ops()) if fusion else ""


def _take_off(model: Any, trained: Mapping[str, torch.Tensor]) -> None:
    unfuse(model)
    set_checkpointing(model, "none")
    for block in _blocks(model):
        block._compiled_call_impl = None
    for name, parameter in model.named_parameters():
        if name in trained:
            parameter.data.copy_(trained[name])
            parameter.grad = None


def _blocks(model: Any) -> Sequence[torch.nn.Module]:
    return model.blocks if hasattr(model, "blocks") else model.transformer_blocks


def _mode(
    model: Any, setting: Setting, inputs: Inputs, optimizer: torch.optim.Optimizer
) -> tuple[CheckpointingMode, str]:
    """The setting's checkpointing mode and its explanation; for `auto`, the advisor's."""
    if setting.checkpointing != "auto":
        return setting.checkpointing, setting.checkpointing
    device = next(model.parameters()).device
    tensors, constants = _split_inputs(inputs)

    def losses(transformer: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return _output(transformer, {**batch, **constants}).square().mean()

    spec = {n: (t.shape, t.dtype) for n, t in tensors.items() if n != TARGET}
    activation_needs = measure_activations(model, losses, spec, device)
    free = get_available_bytes(device, 1) - count_unallocated_bytes(optimizer)
    advice = advise_checkpointing(activation_needs, max(0, free), "auto")
    return advice.mode, advice.message


def _split_inputs(inputs: Inputs) -> tuple[dict[str, torch.Tensor], Inputs]:
    """Split a step's inputs into tensors, which a batch holds, and other values."""
    tensors = {n: value for n, value in inputs.items() if isinstance(value, torch.Tensor)}
    return tensors, {n: value for n, value in inputs.items() if n not in tensors}


def _output(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The model's output in fp32, computed under bf16 autocast as in Accelerate."""
    with torch.autocast(inputs["hidden_states"].device.type, torch.bfloat16):
        output: torch.Tensor = model(**inputs, return_dict=False)[0]
    return output.float()


def sample_losses(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Mean squared error of each sample against the step's noise, (B,) in fp32."""
    inputs = dict(inputs)
    target = inputs.pop(TARGET)
    return (_output(model, inputs) - target).square().flatten(1).mean(1)


@dataclass
class _PlainSteps:
    """The step of Diffusers' scripts: backward, clip, AdamW, no gate."""

    model: Any
    optimizer: torch.optim.Optimizer
    batches: Sequence[Inputs]
    mode: CheckpointingMode
    reason: str
    wait: Callable[[], None]

    def take(self, first_step: int, last_step: int, on_step: OnStep) -> None:
        for number in range(first_step, last_step + 1):
            loss, seconds = self._take(self.batches[number])
            self.wait()
            on_step(number, float(loss), seconds)

    def _take(self, inputs: Inputs) -> tuple[torch.Tensor, float]:
        began = time.perf_counter()
        loss = sample_losses(self.model, inputs).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], _CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), time.perf_counter() - began


class _NoRecovery:
    """Ends the setting if a step fails, since its times would mean nothing."""

    lr_scale = 1.0

    def recover(self, failure: RunFailure) -> int:
        raise RuntimeError(f"the guard tripped: {failure.kind} in step {failure.step}")


@dataclass
class _SettingCallbacks(LoopCallbacks):
    """Yields the setting's batches and reports its steps."""

    batches: Sequence[Inputs]
    report: OnStep

    def load_batches(self, start_step: int) -> Iterator[Batch]:
        for number, batch in enumerate(self.batches[start_step:], start=start_step):
            tensors, _ = _split_inputs(batch)
            rows = range(len(batch["hidden_states"]))
            names = tuple(f"{number}-{row}" for row in rows)
            yield Batch(names, tuple(number * len(rows) + row for row in rows), tensors)

    def on_step(self, result: StepResult) -> None:
        # The loop has read the step's row, so that the host's share cannot be told.
        self.report(result.step - 1, result.loss, None)


@dataclass
class _GuardedSteps:
    """The step of a run: `dit_lora.training.loop.train` with its gate, its norms and its record for replays.

    benchmarks/overhead.py measures snapshots and statistics, which do not come in every step.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    batches: Sequence[Inputs]
    mode: CheckpointingMode
    reason: str
    wait: Callable[[], None]

    def __post_init__(self) -> None:
        # Once: building it compares the kernel of norms with torch, which is no part of a step.
        self._loop = self._build_loop()

    def take(self, first_step: int, last_step: int, on_step: OnStep) -> None:
        loop = replace(self._loop, callbacks=_SettingCallbacks(self.batches, on_step))
        # The loop counts steps from 1.
        train(loop, start_step=first_step, steps=last_step + 1)

    def _build_loop(self) -> TrainingLoopComponents:
        group = GroupConfig(lr=_RATE, schedule="constant", warmup_steps=0)
        optim = OptimConfig(groups=GroupsConfig(adapter=group), clip=_CLIP)
        device = next(self.model.parameters()).device
        _, constants = _split_inputs(self.batches[0])

        def losses(model: Any, batch: Batch, _streams: RandomStreams) -> LossOutput:
            kwargs = {**batch.tensors, **constants}
            return LossOutput(sample_losses(model, kwargs), batch.tensors["timestep"])

        return TrainingLoopComponents(
            engine=Engine(Accelerator(cpu=device.type == "cpu"), self.model, self.optimizer),
            loss_function=losses,
            schedule=LearningRateSchedule(optim, len(self.batches)),
            optim=optim,
            accumulate=1,
            seed=0,
            recovery=_NoRecovery(),
            watcher=StepMonitor(Snapshots(dict, interval_steps=0)),
            callbacks=_SettingCallbacks(self.batches, lambda step, loss, host_share: None),
            compute_norms=choose_norm_function("auto", self.optimizer.param_groups[0]["params"])[0],
        )
