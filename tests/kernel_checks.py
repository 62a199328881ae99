"""What every kernel's test asks of it: accuracy against fp64, nothing unwritten, no row from another sample."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

# One unit in the last place. Triton's interpreter truncates where a GPU rounds to nearest: twice as far off.
_UNIT = {torch.float64: 2e-14, torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of `exact`, of the worst sample (first dimension)."""
    assert value.shape == exact.shape, (value.shape, exact.shape)
    difference = (value.double() - exact.double()).flatten(1) if value.ndim > 1 else None
    if difference is None:
        difference, exact = (value.double() - exact.double())[None], exact[None]
    scale = exact.double().flatten(1).square().mean(1).sqrt().clamp(min=1e-30)
    return (difference.square().mean(1).sqrt() / scale).max().item()


def assert_as_good_as_eager(name: str, ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """No further from fp64 than 1.25 times eager in the same dtype, and one rounding of the result."""
    assert torch.isfinite(ours).all(), f"{name}: not finite"
    allowed = 1.25 * relative_error(eager, exact) + _UNIT[ours.dtype]
    error = relative_error(ours, exact)
    assert error <= allowed, f"{name}: {error:.3g} from fp64, {allowed:.3g} allowed"


@contextmanager
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it new memory from torch.empty and torch.empty_like holds NaN: what a kernel leaves out shows."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return poisoned

    with monkeypatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, poison(getattr(torch, name)))
        yield


def in_nan_arena(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory surrounded by NaN: rows apart, nothing valid before, between or after."""
    size = [n + 2 for n in tensor.shape[:-1]] + [tensor.shape[-1] + 8]
    arena = torch.full(size, float("nan"), dtype=tensor.dtype, device=tensor.device)
    window = arena[tuple(slice(1, n + 1) for n in tensor.shape[:-1])][..., : tensor.shape[-1]]
    window.copy_(tensor.detach())
    return window.requires_grad_(tensor.requires_grad)


def saved_bytes(run: Callable[[], torch.Tensor | Sequence[torch.Tensor]], besides: Sequence[torch.Tensor] = ()) -> int:
    """Bytes that autograd keeps for the backward of `run()`, each storage once; not those of `besides`."""
    excluded = {tensor.untyped_storage().data_ptr() for tensor in besides}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    pack._dit_lora_only_counts = True  # type: ignore[attr-defined]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _result = run()
    return sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in excluded)
