"""Check each step of a loop that is not ours; flags stay on the device until the step is judged."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.guard.gate import any_not_finite
from dit_lora.guard.plugin.host import Host
from dit_lora.numerics.dtensors import local
from dit_lora.numerics.finite import magnitudes

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
        self._names: list[str] = []
        self._bad_weights: torch.Tensor | None = None

    @property
    def has_losses(self) -> bool:
        return bool(self._losses)

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Note a loss before its backward; return a bool scalar on the device, True if it is bad."""
        self._losses.append(loss.detach())
        return ~torch.isfinite(loss.detach()).all() & ("loss" in self._checks)

    def gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Note each gradient's largest magnitude, once a step and before clipping spreads one NaN to all.

        A sum of squares would overflow, or vanish, where no gradient does.
        """
        if self._peaks is not None or not self._checks & {"gradient", "zero_gradient"}:
            return
        grads = {n: local(p.grad) for n, p in parameters.items() if p.grad is not None}
        self._names = [name for name, gradient in grads.items() if gradient.numel()]
        self._peaks = magnitudes([grads[name] for name in self._names], self._host.device)

    def weights(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Note after a step whether a trained weight is not finite."""
        if "weights" in self._checks:
            bad = any_not_finite(parameters.values(), self._host.device)
            self._bad_weights = bad if self._bad_weights is None else self._bad_weights | bad

    def tripped_by(self, asked: Callable[[], bool]) -> str | None:
        """Return what is wrong with this step on any rank, or None: one all-reduce and one read by the host.

        `asked` says whether anything came back to a model's output on this rank: it is called where no trained
        weight has a gradient. If nothing did, the loss wants no change, and the step is as it should be.
        """
        false = torch.tensor(False, device=self._host.device)
        losses = [loss.to(self._host.device) for loss in self._losses]
        bad_loss = (
            torch.stack([~torch.isfinite(x).all() for x in losses]).any() if losses else false
        )
        # A loss of zero asks for no gradient.
        says_something = torch.stack([(x != 0).any() for x in losses]).any() if losses else ~false
        peaks = self._peaks
        bad_gradient = ~torch.isfinite(peaks).all() if peaks is not None else false
        some_gradient = (peaks != 0).any() if peaks is not None else ~false
        bad_weights = false if self._bad_weights is None else self._bad_weights
        flags = torch.stack([bad_loss, bad_weights, bad_gradient, some_gradient, says_something])
        flagged = [bool(count) for count in self._host.summed(flags.float())]
        # In the order of causes: bad weights make the loss bad, and a bad loss its gradients.
        if flagged[1]:
            return "non_finite_weights"
        if flagged[0] and "loss" in self._checks:
            return "non_finite_loss"
        if flagged[2] and "gradient" in self._checks:
            return "non_finite_gradient"
        if flagged[3] or not flagged[4] or "zero_gradient" not in self._checks:
            return None
        return "zero_gradient" if self._host.any_rank(asked()) else None

    def bad_gradients(self) -> list[str]:
        """Return the parameters whose gradient is not finite; none where clipping has already spread it to all."""
        if self._peaks is None:
            return []
        bad = (~torch.isfinite(self._peaks)).tolist()
        names = [name for name, is_bad in zip(self._names, bad, strict=True) if is_bad]
        return names if len(names) < len(self._names) or len(names) == 1 else []

    def has_bad_weights(self) -> bool:
        """Return True if the last step left a trained weight that is not finite; one read by the host."""
        return self._bad_weights is not None and bool(self._bad_weights)

    def forget(self) -> None:
        """Begin the next step."""
        self._losses.clear()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Let gradients be noted anew."""
        self._peaks = None

    def forget_weights(self) -> None:
        """Forget flags of weights that are others now."""
        self._bad_weights = None
