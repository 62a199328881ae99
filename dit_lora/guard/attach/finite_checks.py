"""Check each step of a loop that is not ours; flags stay on the device until the step is judged."""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import isfinite

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.accelerator_adapter import Host
from dit_lora.numerics.dtensors import local
from dit_lora.numerics.finite import is_finite, magnitudes

CHECKS = ("loss", "gradient", "zero_gradient", "weights", "frozen")
"""`loss`: the loss is finite. `gradient`: every gradient is. `zero_gradient`: the loss's gradient reaches a trained
weight. `weights`: every trained weight is finite after the step. `frozen`: frozen weights and buffers have the bits of
the start, but for what the loop itself changes, at a save and when a step trips."""


def checked(names: Collection[str]) -> frozenset[str]:
    """Return the checks of these names; raises `DitLoraError` listing those that there are."""
    unknown = [name for name in names if name not in CHECKS]
    if isinstance(names, str) or unknown:
        raise DitLoraError(f"checks are some of {', '.join(CHECKS)}; got {names!r}")
    return frozenset(names)


class StepChecks:
    """The flags of one optimizer step. Every rank calls the same methods in the same order."""

    def __init__(self, host: Host, checks: frozenset[str]) -> None:
        self._host = host
        self._checks = checks
        self._losses: list[torch.Tensor] = []
        self._peaks: torch.Tensor | None = None
        self._weight_peaks: torch.Tensor | None = None
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._held: list[nn.Parameter] = []
        self._sharded = False
        """True if any of them is sharded, of which a rank has a part."""

    @property
    def losses(self) -> Sequence[torch.Tensor]:
        """The losses that were noted, one for each micro-batch."""
        return self._losses

    @property
    def has_losses(self) -> bool:
        return bool(self._losses)

    def loss(self, loss: torch.Tensor) -> None:
        """Note a loss before its backward."""
        self._losses.append(loss.detach())

    def own_loss_is_bad(self) -> bool:
        """Return True if a loss of this rank is not finite; reads the device."""
        return not all(is_finite(loss) for loss in self._losses)

    def last_loss_is_bad(self) -> torch.Tensor:
        """Return a bool scalar on the device."""
        return ~torch.isfinite(self._losses[-1]).all() & ("loss" in self._checks)

    @torch.no_grad()
    def note(self, parameters: Mapping[str, nn.Parameter], *, gradients: bool) -> None:
        """Note the largest magnitude of each trained weight and, if asked for, of each gradient; each once a step.

        Gradients before clipping spreads one NaN to all. A sum of squares would overflow, or vanish, where none of
        them does.
        """
        if parameters is not self._parameters:  # else a question to each of hundreds, at every step
            self._parameters, self._held = parameters, list(parameters.values())
            self._sharded = any(isinstance(one, DTensor) for one in self._held)
        wants_gradients = (
            gradients and self._peaks is None and bool(self._checks & {"gradient", "zero_gradient"})
        )
        wants_weights = self._weight_peaks is None and "weights" in self._checks
        if not wants_gradients and not wants_weights:
            return
        grads: list[torch.Tensor] = []
        if wants_gradients:
            grads = self._parts([grad for p in self._held if (grad := p.grad) is not None])
        weights = self._parts(self._held) if wants_weights else []
        # In one pass: an operation for each half costs more.
        peaks = magnitudes(grads + weights, self._host.device)
        if wants_gradients:
            self._peaks = peaks[: len(grads)]
        if wants_weights:
            self._weight_peaks = peaks[len(grads) :]

    def tripped_by(self, asked: Callable[[], bool]) -> str | None:
        """Return what is wrong with this step on any rank, or None: one read by the host, and among ranks one all-reduce.

        `asked` says whether anything came back to a model's output on this rank: it is called where no trained
        weight has a gradient. If nothing did, the loss wants no change, and the step is as it should be.
        """
        bad_weights, bad_loss, bad_gradient, some_gradient, says_something = self._agreed()
        # In the order of causes: bad weights make the loss bad, and a bad loss its gradients.
        if bad_weights:
            return "non_finite_weights"
        if bad_loss and "loss" in self._checks:
            return "non_finite_loss"
        if bad_gradient and "gradient" in self._checks:
            return "non_finite_gradient"
        if some_gradient or not says_something or "zero_gradient" not in self._checks:
            return None
        return "zero_gradient" if self._host.any_rank(asked()) else None

    def _agreed(self) -> list[bool]:
        """Return whether weights, losses and gradients are bad, any gradient is not zero, and any loss asks for one."""
        peaks, device = self._peaks, self._host.device
        losses = [loss.reshape(-1).to(device) for loss in self._losses]
        noted = [one for one in (peaks, self._weight_peaks) if one is not None]
        parts = [*losses, *noted]
        # Values are judged by the host, which has to wait for them anyway: an operation for each question costs more.
        values = torch.cat(parts).tolist() if parts else []
        of_losses = values[: sum(map(len, losses))]
        of_gradients = values[len(of_losses) :][: 0 if peaks is None else len(peaks)]
        of_weights = values[len(of_losses) + len(of_gradients) :]
        # Magnitudes are fp32 and not negative: their sum is finite, and above 0, as any of them is.
        gradients = sum(of_gradients)
        flags = [
            not isfinite(sum(of_weights)),
            not all(map(isfinite, of_losses)),
            not isfinite(gradients),
            peaks is None or gradients != 0,
            # A loss of zero asks for no gradient.
            not losses or any(of_losses),
        ]
        if self._host.ranks == 1:
            return flags
        return list(map(bool, self._host.summed(torch.tensor(flags, device=device).float())))

    def bad_gradients(self) -> list[str]:
        """Return the parameters whose gradient is not finite; none where clipping has already spread it to all."""
        if self._peaks is None:
            return []
        # Named only now: to make lists of names costs as much as all else.
        held = self._parameters.items()
        names = [name for name, p in held if p.grad is not None and local(p.grad).numel()]
        if len(names) != len(self._peaks):  # they were cleared since
            return []
        are_bad = (~torch.isfinite(self._peaks)).tolist()
        bad = [name for name, is_bad in zip(names, are_bad, strict=True) if is_bad]
        return bad if len(bad) < len(names) or len(bad) == 1 else []

    def forget(self) -> None:
        """Begin the next step."""
        self._losses.clear()
        self._weight_peaks = None
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Let gradients be noted anew."""
        self._peaks = None

    def _parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's parts of tensors that have any."""
        if not self._sharded:
            return list(tensors)
        # FSDP2 leaves some ranks nothing of a weight that has fewer rows than there are ranks.
        return [part for tensor in tensors if (part := local(tensor)).numel()]
