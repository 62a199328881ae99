"""Record digests of frozen weights and buffers at the start, and compare them later: training must not change them.

A norm does not detect a flipped sign, and a sum does not detect two exchanged rows, so the bits themselves are
compared, by a 64-bit digest per tensor. It reads every byte: seconds for 10 GB on a CPU; not timed on a GPU.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dit_lora.numerics.digest import compute_tensor_digest
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.numerics.finite import read_scalars
from dit_lora.numerics.layouts import get_strided_values
from dit_lora.numerics.quantized_linear import iterate_weight_values

Digests = Mapping[str, tuple[tuple[object, ...], int]]
"""For each tensor name, its shape and dtype, and its digest."""


def iter_frozen_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's values of every frozen weight and buffer, strided, without BatchNorm's running statistics."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, values in iterate_weight_values(model):
        if name not in trained:
            yield f"weight {name}", get_strided_values(values)
    for owner, module in model.named_modules():
        # BatchNorm updates its running statistics in every training forward, frozen or not.
        if isinstance(module, _NormBase) and module.track_running_stats:
            continue
        for key, buffer in module.named_buffers(recurse=False):
            values = get_strided_values(get_local_tensor(buffer.detach()))
            yield f"buffer {owner}.{key}" if owner else f"buffer {key}", values


class FrozenWeightDigests:
    """Digests of a model's frozen weights and buffers, computed at construction, to detect later changes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._digests = self._compute_digests()

    def describe_changes(self) -> list[str]:
        """Describe frozen weights and buffers whose bits have changed since construction.

        Tensors with a new shape are skipped, since code changed them.
        """
        return [f"{name} has changed since the start" for name in self._find_changed_tensors()]

    def _find_changed_tensors(self) -> list[str]:
        return find_changed_digests(self._digests, self._compute_digests())

    def _iter_frozen_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter_frozen_tensors(self._model)

    def _compute_digests(self) -> Digests:
        """Compute the current digests of frozen weights and buffers by name, with shape and dtype.

        The host reads each device once.
        """
        device_digests: dict[str, tuple[tuple[object, ...], Tensor]] = {}
        for name, values in self._iter_frozen_tensors():
            # Empty tensors and meta tensors have no bits to compare.
            if values.numel() and values.device.type != "meta":
                device_digests[name] = ((values.shape, values.dtype), compute_tensor_digest(values))
        digests = read_scalars({name: digest for name, (_, digest) in device_digests.items()})
        return {name: (shape, digests[name]) for name, (shape, _) in device_digests.items()}


def find_changed_digests(before: Digests, after: Digests) -> list[str]:
    return [
        name
        for name, (shape, digest) in before.items()
        if name in after and after[name][0] == shape and after[name][1] != digest
    ]
