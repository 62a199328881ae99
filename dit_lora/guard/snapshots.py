"""Snapshots of the trained state in host memory, which a run can restore bit for bit.

On CUDA a snapshot is copied on a separate stream into pinned memory; once that memory is allocated, the host waits for
nothing:

    if snapshots.is_snapshot_due(step): snapshots.take_snapshot(step)   # after the optimizer of `step`
    ...                                            # forward and backward of the next step, during the copy
    snapshots.before_update()                      # before its optimizer
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from dit_lora.errors import DitLoraError, format_list
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.numerics.finite import is_finite, read_scalars
from dit_lora.numerics.outliers import compute_largest_magnitudes

Tensors = dict[str, torch.Tensor]


class Snapshots:
    """The last `max_snapshots` snapshots of the tensors, or this rank's shards of them, that `get_tensors` returns.

    `get_tensors` may return more tensors from one call to the next, as with AdamW after its first step. All CUDA
    tensors are on one device. Nothing here is collective, but every rank calls the same methods in the same steps. For
    values that are not tensors, such as an int step count, `get_tensors` returns a tensor copy; `write_back` receives
    the restored tensors to write such values back.
    """

    def __init__(
        self,
        get_tensors: Callable[[], Mapping[str, torch.Tensor]],
        *,
        interval_steps: int,
        max_snapshots: int = 2,
        write_back: Callable[[Mapping[str, torch.Tensor]], None] = lambda restored: None,
    ) -> None:
        self._get_tensors = get_tensors
        self._write_back = write_back
        self._interval_steps = interval_steps
        self._max_snapshots = max_snapshots
        self._snapshots: dict[int, Tensors] = {}
        self._spare_buffers: list[Tensors] = []
        self._stream: torch.cuda.Stream | None = None
        self._copy_event: torch.cuda.Event | None = None

    @property
    def steps(self) -> list[int]:
        """Steps that have a snapshot, ascending."""
        return sorted(self._snapshots)

    def is_snapshot_due(self, step: int) -> bool:
        return step % self._interval_steps == 0

    @torch.no_grad()
    def take_snapshot(self, step: int) -> None:
        """Copy the current values of all tensors as the snapshot of `step`; replaces the oldest of `max_snapshots`."""
        live = self._get_current_tensors()
        buffers = self._take_buffers(step)
        with self._use_copy_stream(live):
            is_on_cpu = all(tensor.device.type == "cpu" for tensor in live.values())
            if is_on_cpu and all(
                name in buffers and _has_same_shape_and_dtype(buffers[name], t) for name, t in live.items()
            ):
                # Copy all tensors in one operation: on a CPU, one per tensor would cost more than the copying.
                torch._foreach_copy_([buffers[name] for name in live], list(live.values()))
                # Buffers of tensors that no longer exist are released here.
                self._snapshots[step] = {name: buffers[name] for name in live}
            else:
                self._snapshots[step] = {name: _copy_into(buffers.get(name), tensor) for name, tensor in live.items()}

    def before_update(self) -> None:
        """Make the current CUDA stream wait for a running snapshot copy, whose source an optimizer would overwrite."""
        if self._copy_event is not None:
            self._copy_event.wait()

    @torch.no_grad()
    def restore_snapshot(self, step: int) -> list[str]:
        """Restore the values of `step` bit for bit, drop later snapshots, and return the names of newer tensors.

        Newer tensors are unchanged and the caller must drop them: before AdamW's first step, for example, there was no
        optimizer state.

        Raises:
            DitLoraError: If `step` has no snapshot, or one of its tensors no longer exists or has another shape or
                dtype. Nothing is changed then.
        """
        saved, live = self.read_snapshot(step), self._get_current_tensors()
        incompatible = [
            name for name, buffer in saved.items() if not _has_same_shape_and_dtype(buffer, live.get(name))
        ]
        # Check all tensors before writing any: a partly restored step is worse than none.
        if incompatible:
            summary = f"cannot restore step {step}: these tensors are gone, or have another shape or dtype"
            raise DitLoraError(format_list(summary, incompatible))
        for name, buffer in saved.items():
            live[name].copy_(buffer)
        # Values that are not tensors were copied into tensors; write them back from these.
        self._write_back({name: live[name] for name in saved})
        # Later snapshots hold the state that is being undone.
        for later in [held_step for held_step in self._snapshots if held_step > step]:
            self.drop_snapshot(later)
        return [name for name in live if name not in saved]

    def read_snapshot(self, step: int) -> Tensors:
        """Wait for a snapshot's copy, and return its buffers. Later snapshots overwrite them."""
        self._require_snapshot(step)
        if self._copy_event is not None:
            self._copy_event.synchronize()
        return self._snapshots[step]

    def find_nonfinite(self, step: int) -> list[str]:
        """Names of tensors in a snapshot that are not finite."""
        return [name for name, buffer in self.read_snapshot(step).items() if not is_finite(buffer)]

    def compute_largest_magnitudes(self) -> dict[str, float]:
        """Largest magnitude of each tensor of the newest snapshot; empty if there is none."""
        return (
            read_scalars(compute_largest_magnitudes(self.read_snapshot(max(self._snapshots))))
            if self._snapshots
            else {}
        )

    def drop_snapshot(self, step: int) -> None:
        """Drop a snapshot and reuse its buffers for the next one."""
        self._require_snapshot(step)
        self._spare_buffers.append(self._snapshots.pop(step))

    def _get_current_tensors(self) -> Tensors:
        return {name: get_local_tensor(tensor) for name, tensor in self._get_tensors().items()}

    def _take_buffers(self, step: int) -> Tensors:
        """Buffers for a new snapshot: of the same step, spare ones, or of the oldest snapshot, which is dropped."""
        # If a step is repeated, its new snapshot replaces the old one.
        if step in self._snapshots:
            return self._snapshots.pop(step)
        # Reuse buffers where possible: pinned memory is slow to allocate.
        if self._spare_buffers:
            return self._spare_buffers.pop()
        # At the limit overwrite the oldest snapshot; below it, start with no buffers.
        return self._snapshots.pop(min(self._snapshots)) if len(self._snapshots) == self._max_snapshots else {}

    @contextmanager
    def _use_copy_stream(self, live: Tensors) -> Iterator[None]:
        """Queue CUDA copies on their own stream inside the context.

        They run after the current stream's work, in parallel with its later work.
        """
        # On a CPU, copying runs in the calling thread.
        device = next((tensor.device for tensor in live.values() if tensor.is_cuda), None)
        if device is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        # The copy must see the values that the previous update has written.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield
            # Marks the end of the copy, for which updates and reads have to wait.
            self._copy_event = self._stream.record_event()

    def _require_snapshot(self, step: int) -> None:
        if step not in self._snapshots:
            steps = ", ".join(map(str, self.steps)) or "none"
            raise DitLoraError(f"there is no snapshot of step {step}; steps with a snapshot: {steps}")


def _copy_into(buffer: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """Copy the tensor into the buffer if it fits, else into a new one, pinned for a CUDA tensor."""
    if buffer is None or not _has_same_shape_and_dtype(buffer, tensor):
        # Only a copy to pinned memory can run in parallel with the computation.
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    buffer.copy_(tensor, non_blocking=True)
    if tensor.is_cuda:
        # If the owner frees the tensor, its memory must not be reused before this stream has read it.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return buffer


def _has_same_shape_and_dtype(buffer: torch.Tensor, tensor: torch.Tensor | None) -> bool:
    return tensor is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
