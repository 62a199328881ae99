"""Check the gradients and weights of one optimizer with as few operations and device reads as possible.

On a CPU an operation on a small tensor costs as much as its dispatch, so small tensors are joined and checked as one:
joining 200 of them takes a tenth of the time of 200 norms. Tensors that differ only in their first dimension are
joined without flattening, which takes a third of the time of joining them flattened.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isfinite
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dit_lora.config.optimizers import collect_optimizer_names
from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.finite_values import SQUARE_LIMIT, is_finite_tensor, to_strided_real
from dit_lora.numerics.dtensors import get_local_tensor

CHECKS = ("loss", "gradient", "zero_gradient", "weights", "frozen")
"""`loss`: report a loss that is not finite though every gradient is. `gradient`: every gradient is finite.
`zero_gradient`: report steps in which the loss asks for a change and no trained weight gets a gradient. `weights`:
every trained weight is finite after the step. `frozen`: frozen weights and buffers have the bits of the start, except
for what the loop itself changes; compared when a step fails and in `require_finite`."""

_MAX_SMALL_ELEMENTS = 65_536  # elements up to which tensors are joined
_MAX_JOINED_TENSORS = 256  # tensors, of up to 64 MiB together
_get_gradient = attrgetter("grad")
_get_address = torch.Tensor.data_ptr
_SQUARED_STATE = (
    *collect_optimizer_names(lambda record: record.squared_state),
    # Of torch's optimizers without a record: Adam with amsgrad, RMSprop and Adadelta, Adagrad, Adafactor.
    *("max_exp_avg_sq", "square_avg", "sum", "row_var", "col_var", "variance"),
)
"""Beginnings of the names of state tensors that hold squared gradients."""
_NUM_ADDRESS_GROUPS = 8  # groups of weights; the addresses of one group are compared at each step


def validate_check_names(names: Collection[str]) -> frozenset[str]:
    """The checks with these names, as a set.

    Raises:
        DitLoraError: If a name is not in `CHECKS`.
    """
    unknown = [name for name in names if name not in CHECKS]
    if isinstance(names, str) or unknown:
        raise DitLoraError(f"checks must be some of {', '.join(CHECKS)}; got {names!r}")
    return frozenset(names)


def _compute_largest_magnitude(tensors: Sequence[torch.Tensor]) -> float:
    """Largest magnitude among tensors of any layout and dtype; 0.0 without values, NaN if any value is NaN."""
    peaks = [values.abs().max() for t in tensors if (values := to_strided_real(t)).numel()]
    if not peaks:
        return 0.0
    # The key sorts NaN above every number.
    return max((float(peak) for peak in peaks), key=lambda peak: (peak != peak, peak))


def compute_max_magnitude(tensors: Iterable[torch.Tensor]) -> float:
    """Largest magnitude among tensors of any layout and dtype, computed in few operations for many small ones.

    NaN if any value is NaN.
    """
    joined: list[torch.Tensor] = []
    unjoined: list[torch.Tensor] = []
    for tensor in tensors:
        is_plain = type(tensor) is torch.Tensor and tensor.dtype is torch.float32
        is_small = is_plain and tensor.is_cpu and tensor.numel() <= _MAX_SMALL_ELEMENTS
        # Sparse, sharded or GPU tensors, and large ones, are measured one by one.
        (joined if is_small and tensor.layout is torch.strided else unjoined).append(tensor)
    peaks = [_compute_largest_magnitude(unjoined)]
    for start in range(0, len(joined), _MAX_JOINED_TENSORS):
        chunk = joined[start : start + _MAX_JOINED_TENSORS]
        flat = torch._C._nn.flatten_dense_tensors(chunk)  # type: ignore[attr-defined]
        peaks.append(float(flat.abs().max()) if flat.numel() else 0.0)
    return max(peaks, key=lambda peak: (peak != peak, peak))


class OptimizerChecks:
    """Finiteness checks of the gradients and weights that one optimizer trains.

    Args:
        parameters: The trained parameters, by name.
        optimizer: The optimizer, which may hold frozen parameters too.
        checked_ids: Ids of parameters that were checked before, and so were finite once.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], optimizer: Any, checked_ids: Collection[int] = ()
    ) -> None:
        # A weight that is not finite from the start is intended by the loop, for example a mask.
        self.unchecked_names = [name for name, p in parameters if id(p) not in checked_ids and not is_finite_tensor(p)]
        skipped = set(self.unchecked_names)
        self.parameters = [(name, p) for name, p in parameters if name not in skipped]
        checked_parameters = [p for _, p in self.parameters]
        trained = {id(p) for _, p in parameters}
        param_groups = getattr(optimizer, "param_groups", ())
        # Parameters that the optimizer holds and that require no gradient so far.
        self._frozen = [p for group in param_groups for p in group["params"] if id(p) not in trained]
        self._group_index = 0
        # Gradients with the same number of dimensions and trailing shape can be concatenated.
        groups: dict[tuple[int, torch.Size], list[nn.Parameter]] = {}
        for p in checked_parameters:
            if p.numel() <= _MAX_SMALL_ELEMENTS:
                groups.setdefault((p.ndim, p.shape[1:]), []).append(p)
        self._groups = list(groups.values())
        self._small = [p for group in self._groups for p in group]
        # Copying a large tensor costs more than a call, so these are not joined.
        self._large = [p for p in checked_parameters if p.numel() > _MAX_SMALL_ELEMENTS]
        self._is_plain = all(
            type(get_local_tensor(p.detach())) is torch.Tensor
            and not isinstance(p, DTensor)
            and p.layout is torch.strided
            for p in checked_parameters
        )
        self._on_cpu = all(p.device.type == "cpu" for p in checked_parameters)
        dtypes = {p.dtype for p in checked_parameters}
        has_one_dtype = len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64, torch.bfloat16}
        # Tensors can be concatenated if they are plain, on the CPU and of one dtype.
        self._can_join = self._is_plain and self._on_cpu and has_one_dtype
        # Accelerate wraps the optimizer.
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        self._lacks_gradients = False
        self._views: list[torch.Tensor] = []
        self._unjoined: list[torch.Tensor] = []
        self._address_groups: list[tuple[list[nn.Parameter], list[int]]] = []
        """Groups of weights with their addresses; the first weight is in every group. Empty before the first check."""
        self.bad_before_clipping: list[str] = []
        """Parameters whose gradient was not finite before clipping spread it, until the loop clears its gradients."""

    @property
    def has_unfrozen_parameter(self) -> bool:
        """True if a parameter that was frozen at construction now has a gradient."""
        return bool(self._frozen) and any(p.grad is not None for p in self._frozen)

    def has_healthy_gradients(self) -> bool:
        """True if all current gradients are finite, not all zero, and small enough to be squared in fp32.

        The usual case in as few operations as possible; False means that `compute_gradient_peak` has to be computed.
        """
        if not self._can_join:
            return False
        norms = 0.0
        try:
            for group in self._groups:
                joined = self._join_gradients(group)
                # The norm is not finite if any value is not, and it is at least the largest magnitude.
                norms += float(torch.linalg.vector_norm(joined)) if joined is not None else 0.0
        except (RuntimeError, NotImplementedError):  # sparse gradients, or several dtypes
            return False
        large = [grad for p in self._large if (grad := p.grad) is not None]
        if large:
            norms += self._compute_peak_magnitude([], large)
        # The sum of norms bounds the largest magnitude. NaN fails both comparisons.
        return 0 < norms < SQUARE_LIMIT

    def _join_gradients(self, group: list[nn.Parameter]) -> torch.Tensor | None:
        """Concatenate the gradients of a group of parameters; None if there are none."""
        # Scalars have no dimension to concatenate along.
        join = torch.cat if group[0].ndim else torch.stack
        if not self._lacks_gradients:
            try:
                return join(list(map(_get_gradient, group)))
            except TypeError:  # a gradient is None, and will probably be None in later steps too
                self._lacks_gradients = True
        grads = [grad for p in group if (grad := p.grad) is not None]
        return join(grads) if grads else None

    def compute_gradient_peak(self) -> float:
        """Largest magnitude of the optimizer's current gradients; 0 without gradients, NaN if any value is NaN."""
        small = [grad for p in self._small if (grad := p.grad) is not None]
        large = [grad for p in self._large if (grad := p.grad) is not None]
        with torch.no_grad():
            return self._compute_peak_magnitude(small, large)

    def _compute_peak_magnitude(self, tensors: list[torch.Tensor], large_tensors: Sequence[torch.Tensor]) -> float:
        """Largest magnitude among gradients or weights of the parameters."""
        if not tensors and not large_tensors:
            return 0.0
        if self._is_plain:
            try:
                return self._compute_largest_magnitude_fast(tensors, large_tensors)
            except (RuntimeError, NotImplementedError):  # sparse gradients, or several devices
                pass
        return _compute_largest_magnitude([*tensors, *large_tensors])

    def _compute_largest_magnitude_fast(
        self, tensors: list[torch.Tensor], large_tensors: Sequence[torch.Tensor]
    ) -> float:
        if not self._on_cpu:
            # One call for all tensors, and a single read from the device.
            norms = torch._foreach_norm([*tensors, *large_tensors], float("inf"))
            return float(torch.stack(norms).max())
        peaks: list[float] = []
        if tensors:
            joined = torch._C._nn.flatten_dense_tensors(tensors)  # type: ignore[attr-defined]
            peaks.append(float(joined.abs().max()) if joined.numel() else 0.0)
        peaks += [float(torch.linalg.vector_norm(tensor, float("inf"))) for tensor in large_tensors]
        return max(peaks, key=lambda peak: (peak != peak, peak))

    def is_bad_gradient(self, peak: float) -> bool:
        """True for a gradient peak of NaN or Inf, or whose square overflows if the optimizer has second moments."""
        if not isfinite(peak):
            return True
        if peak <= SQUARE_LIMIT or all(p.dtype is torch.float64 for _, p in self.parameters):
            return False
        states = getattr(self._optimizer, "state", {}).values()
        names = {str(name) for state in states if isinstance(state, Mapping) for name in state}
        if not names:
            # Before the first step there is no state: optimizers that divide by a second moment's root have an `eps`.
            return bool(getattr(self._optimizer, "defaults", {}).get("eps"))
        return any(name.startswith(_SQUARED_STATE) for name in names)

    def find_bad_gradients(self) -> list[str]:
        """Names of the parameters whose gradient is not finite or too large. Slow; used for failed steps."""
        return [
            name
            for name, p in self.parameters
            if p.grad is not None and self.is_bad_gradient(_compute_largest_magnitude([p.grad]))
        ]

    def has_finite_weights(self) -> bool:
        if not self._can_join:
            with torch.no_grad():
                return isfinite(self._compute_peak_magnitude([*self._small, *self._large], []))
        if not self._do_views_share_memory():
            # A flat view shares the weight's memory, so views have to be made only once.
            joined = [p for p in self._small if p.is_contiguous()]
            unjoined = [p for p in self._small if not p.is_contiguous()] + self._large
            self._views = [p.detach().view(-1) for p in joined]
            self._unjoined = [p.detach() for p in unjoined]
            weights = joined + unjoined
            groups = [[*weights[:1], *weights[number::_NUM_ADDRESS_GROUPS]] for number in range(_NUM_ADDRESS_GROUPS)]
            self._address_groups = [(group, list(map(_get_address, group))) for group in groups]
        if self._views:
            flat = torch.cat(self._views)
            # A norm takes half the time of a maximum. Squares overflow before weights do, hence the second check.
            norm = float(torch.linalg.vector_norm(flat))
            if not isfinite(norm) and not isfinite(float(flat.abs().max())):
                return False
        return not self._unjoined or isfinite(self._compute_peak_magnitude([], self._unjoined))

    def _do_views_share_memory(self) -> bool:
        """False if a parameter has been moved to other memory with `.data`, so that views of it are outdated.

        Each call checks the first weight and an eighth of all weights.
        """
        if not self._address_groups:
            return False
        self._group_index = (self._group_index + 1) % _NUM_ADDRESS_GROUPS
        # A weight that has moved leaves its view on the old memory.
        parameters, addresses = self._address_groups[self._group_index]
        return list(map(_get_address, parameters)) == addresses
