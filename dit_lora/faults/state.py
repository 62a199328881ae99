"""Faults of what is trained: weights, moments, gradients, the learning rate, the base."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dit_lora.faults.fault import Expected, Fault
from dit_lora.faults.triggers import Change
from dit_lora.faults.world import Arm, Stage, Tensors
from dit_lora.fuse.gradient_norms import Norms
from dit_lora.numerics.dtensors import is_sharded, local
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import Streams

_WHERE = "{attention}.{key}.lora_B.default.weight"
_LAYER = "{key}.lora_B.default"


def _write(value: float, stage: Stage, tensor: torch.Tensor, rank: int = -1) -> None:
    """Set one element on one rank, or on all."""
    part = local(tensor)
    if rank == -1 and part is not tensor and stage.rank:
        return  # of sharded weights the first rank's part, so that one element of the whole is bad
    if rank in (-1, stage.rank) or rank >= stage.ranks:
        with torch.no_grad():
            part.view(-1)[2] = value


def _weight(value: float, step: int, *, rank: int = -1, name: str = _WHERE) -> Arm:
    """Let a trained weight go bad in memory between two steps."""

    def arm(stage: Stage) -> None:
        def act() -> None:
            for tensor in stage.held(stage.site.named(name)):
                _write(value, stage, tensor, rank)

        stage.before_step(step, act)

    return arm


def _moment(value: float, step: int, key: str, *, rank: int = -1) -> Arm:
    def arm(stage: Stage) -> None:
        def act() -> None:
            moments = stage.run.setup.engine.own_moments()
            this_ranks = [moment for name, moment in moments.items() if name.endswith(f"/{key}")]
            wanted = f"{stage.site.named(_WHERE)}/{key}"
            matching = [moment for name, moment in moments.items() if name.endswith(wanted)]
            if not matching and rank == -1:
                return  # where ranks share moments out, this one is another rank's
            _write(value, stage, (matching or this_ranks)[0], rank)

        stage.before_step(step, act)

    return arm


def _gradient(
    change: Callable[[torch.Tensor], torch.Tensor], *, name: str | None, once: bool, rank: int = -1
) -> Arm:
    """Change gradients as they arrive: one parameter's, or all; in step 3's first backward, or always after."""

    def arm(stage: Stage) -> None:
        state = {"armed": False}

        def hook(grad: torch.Tensor) -> torch.Tensor:
            return change(grad) if state["armed"] else grad

        wanted = stage.site.named(name) if name else None
        parameters = [p for n, p in stage.trained().items() if wanted in (None, n)]
        if is_sharded(stage.transformer):
            _hook_parts(stage, parameters, hook)
        else:
            for parameter in parameters:
                parameter.register_hook(hook)

        def set_armed(value: bool) -> None:
            state["armed"] = value and (rank in (-1, stage.rank) or rank >= stage.ranks)

        stage.before_step(3, lambda: set_armed(True))
        if once:
            # Disarmed by the first replay or by the step's second attempt, whichever comes first.
            recover = stage.run.recovery.recover

            def disarmed(*args: Any) -> int:
                set_armed(False)
                return recover(*args)

            stage.patch(stage.run.recovery, "recover", disarmed)

    return arm


def _hook_parts(stage: Stage, parameters: Sequence[nn.Parameter], hook: Change) -> None:
    """Change this rank's parts of gradients before the step looks at them: what is whole in a pass is FSDP2's own."""
    engine = stage.run.setup.engine
    inner = engine.gradient_norms

    def norms(by: Norms | None) -> dict[str, torch.Tensor]:
        for parameter in parameters:
            if parameter.grad is not None and local(parameter.grad).numel():
                part = local(parameter.grad)
                part.copy_(hook(part))
        return inner(by)

    stage.patch(engine, "gradient_norms", norms)


def _one_nan(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.clone()
    grad.view(-1)[1] = torch.nan
    return grad


def _average(stage: Stage) -> None:
    """Put NaN into the moving average of one weight: nothing that is trained shows it."""

    def act() -> None:
        assert stage.run.ema is not None
        _write(torch.nan, stage, stage.run.ema.tensors()[f"ema/{stage.site.named(_WHERE)}"])

    stage.before_step(4, act)


def _loss_once(stage: Stage) -> None:
    """Make the loss NaN in step 3, once; the average must not move for it."""
    calls: list[int] = []
    stage.before_step(3, lambda: calls.append(0))

    def change(output: LossOutput, batch: Tensors, streams: Streams) -> LossOutput:
        if calls and not calls[0]:
            calls[0] = 1
            return LossOutput(output.losses * torch.nan, output.timesteps)
        return output

    stage.checkpoint.after.append(change)


def _frozen(stage: Stage) -> None:
    parameter = dict(stage.transformer.named_parameters())[f"{stage.site.ff_out}.weight"]
    stage.before_step(4, lambda: _write(torch.nan, stage, parameter.data))


def _zero_loss(stage: Stage) -> None:
    """Make the loss no longer depend on the model, from step 3 on."""
    state = {"armed": False}
    stage.before_step(3, lambda: state.update(armed=True))

    def change(output: LossOutput, batch: Tensors, streams: Streams) -> LossOutput:
        losses = output.losses * 0.0 if state["armed"] else output.losses
        return LossOutput(losses, output.timesteps)

    stage.checkpoint.after.append(change)


def _two_samples(stage: Stage) -> None:
    """Make every sample of one epoch bad in one micro-batch: the target, and whoever is beside it."""

    def change(batch: Tensors, streams: Streams) -> Tensors:
        is_bad = any(stage.is_target(batch))
        for row in range(len(batch[stage.site.mark])) if is_bad else ():
            stage.spoil(batch, row)
        return batch

    stage.checkpoint.before.append(change)


def _weight_and_sample(stage: Stage) -> None:
    """Let a weight go bad in the step in which the target's data is bad too."""
    _weight(torch.nan, 4)(stage)

    def change(batch: Tensors, streams: Streams) -> Tensors:
        for row, is_target in enumerate(stage.is_target(batch)):
            if is_target:
                stage.spoil(batch, row)
        return batch

    stage.checkpoint.before.append(change)


_HIGH = (("optim.clip", None), ("optim.groups", {"adapter": {"lr": 1e3}}))
_WITH_EMA = (("train.ema", 0.9),)
_HUGE = (("optim.clip", None), ("optim.groups", {"adapter": {"lr": 1e38}}))


_ROLLED = Expected("weights", "rollback", ("1 NaN",), module=_LAYER, same_as="clean")
_ROLLED_INF = Expected("weights", "rollback", ("1 Inf",), module=_LAYER, same_as="clean")
_MOMENT = Expected("optimizer", "rollback", module=_LAYER, same_as="clean")
_AVERAGE = Expected("weights", "rollback", ("moving average",), module=_LAYER, same_as="clean")
_RETRIED = Expected("transient", "retry", same_as="clean")
_DIVERGED = Expected("learning_rate", "rollback", ("learning rate is too high",), exit_code=3)
FAULTS: tuple[Fault, ...] = (
    Fault("NaN in an adapter weight", "weights", "before step 4", _ROLLED, _weight(torch.nan, 4)),
    Fault(
        "Inf in an adapter weight",
        "weights",
        "before step 4",
        _ROLLED_INF,
        _weight(torch.inf, 4),
    ),
    Fault(
        "NaN in an adapter weight of one rank",
        "weights",
        "before step 4, rank 1",
        _ROLLED,
        _weight(torch.nan, 4, rank=1),
        engines=("ddp", "fsdp2"),  # ZeRO-2 gathers the weights anew with every step
    ),
    Fault(
        "NaN in an adapter weight at the last step",
        "weights",
        "before step 6",
        _ROLLED,
        _weight(torch.nan, 6),
    ),
    Fault(
        "NaN in an adapter weight at the first step",
        "weights",
        "before step 1",
        _ROLLED,
        _weight(torch.nan, 1),
    ),
    Fault(
        "NaN in AdamW's first moment",
        "optimizer",
        "before step 4",
        _MOMENT,
        _moment(torch.nan, 4, "exp_avg"),
    ),
    Fault(
        "NaN in AdamW's second moment",
        "optimizer",
        "before step 4",
        _MOMENT,
        _moment(torch.nan, 4, "exp_avg_sq"),
    ),
    Fault(
        "Inf in AdamW's first moment",
        "optimizer",
        "before step 4",
        _MOMENT,
        _moment(torch.inf, 4, "exp_avg"),
    ),
    Fault(
        "a negative second moment of one rank",
        "optimizer",
        "before step 5, rank 1",
        Expected("optimizer", "rollback", ("not be negative",), same_as="clean"),
        _moment(-1.0, 5, "exp_avg_sq", rank=1),
    ),
    Fault(
        "NaN in one gradient element, once",
        "gradient",
        "step 3",
        _RETRIED,
        _gradient(_one_nan, name=_WHERE, once=True),
    ),
    Fault(
        "NaN in one gradient element of one rank",
        "gradient",
        "step 3, rank 1",
        _RETRIED,
        _gradient(_one_nan, name=_WHERE, once=True, rank=1),
    ),
    Fault(
        "Inf in all gradients, once",
        "gradient",
        "step 3",
        _RETRIED,
        _gradient(lambda g: g * torch.inf, name=None, once=True),
    ),
    Fault(
        "NaN in all gradients, once",
        "gradient",
        "step 3",
        _RETRIED,
        _gradient(lambda g: g * torch.nan, name=None, once=True),
    ),
    Fault(
        "all gradients zero, once",
        "gradient",
        "step 3",
        _RETRIED,
        _gradient(torch.zeros_like, name=None, once=True),
    ),
    Fault(
        "a loss that no longer depends on the model",
        "gradient",
        "from step 3",
        Expected("unknown", "stop", exit_code=3),
        _zero_loss,
    ),
    Fault(
        "NaN in a frozen weight",
        "base",
        "before step 4",
        Expected("weights", "stop", ("frozen weight",), module="{ff_out}", exit_code=3),
        _frozen,
    ),
    Fault("NaN in the moving average", "EMA", "before step 4", _AVERAGE, _average, _WITH_EMA),
    Fault("NaN loss under a moving average", "EMA", "step 3", _RETRIED, _loss_once, _WITH_EMA),
    Fault("learning rate 1e3", "learning rate", "from the start", _DIVERGED, None, _HIGH),
    Fault("learning rate 1e38", "learning rate", "from the start", _DIVERGED, None, _HUGE),
    Fault(
        "a micro-batch of which every sample is bad",
        "latent",
        "every time",
        Expected("data", "quarantine"),
        _two_samples,
    ),
    Fault(
        "a weight and a sample at once",
        "weights",
        "before step 4",
        Expected("weights", "rollback", same_as="without"),
        _weight_and_sample,
    ),
)
