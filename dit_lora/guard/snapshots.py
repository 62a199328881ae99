"""Snapshots of what a run trains, in host memory: a step held here can be gone back to, bit for bit.

On CUDA a snapshot is copied on a stream of its own into pinned memory, and once that is allocated the host
waits for nothing:

    if snapshots.due(step): snapshots.take(step)   # after the optimizer of `step`
    ...                                            # forward and backward of the next step, beside the copy
    snapshots.before_update()                      # before its optimizer
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from dit_lora.errors import DitLoraError, listed
from dit_lora.numerics.dtensors import local
from dit_lora.numerics.finite import is_finite, read_scalars
from dit_lora.numerics.outliers import stacked_peaks

Tensors = dict[str, torch.Tensor]


class Snapshots:
    """The last `keep` snapshots of the tensors that `state` gives by name; of a DTensor, this rank's shard.

    `state` may give more tensors from one call to the next, as AdamW does after its first step. CUDA tensors
    are all on one device. Nothing here is collective: every rank calls the same methods in the same steps.

    Of what is no tensor, such as a step count that is an int, `state` gives a copy; `put` is given the restored
    tensors to write such values back.
    """

    def __init__(
        self,
        state: Callable[[], Mapping[str, torch.Tensor]],
        *,
        every: int,
        keep: int = 2,
        put: Callable[[Mapping[str, torch.Tensor]], None] = lambda restored: None,
    ) -> None:
        self._state = state
        self._put = put
        self._every = every
        self._keep = keep
        self._held: dict[int, Tensors] = {}
        self._spare: list[Tensors] = []
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def steps(self) -> list[int]:
        """The steps held, ascending."""
        return sorted(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in buffers, those of forgotten snapshots included: they are used again."""
        sets = [*self._held.values(), *self._spare]
        return sum(buffer.nbytes for buffers in sets for buffer in buffers.values())

    def due(self, step: int) -> bool:
        return step % self._every == 0

    @torch.no_grad()
    def take(self, step: int) -> None:
        """Hold the values of now as those of `step`; the oldest snapshot gives way once `keep` are held."""
        live = self._live()
        buffers = self._free_buffers(step)
        with self._aside(live):
            if _all_fit(buffers, live):
                # One operation for all; on a CPU each would cost more than the values that it copies.
                torch._foreach_copy_([buffers[name] for name in live], list(live.values()))
                self._held[step] = {name: buffers[name] for name in live}
            else:
                self._held[step] = {
                    name: _copied_into(buffers.get(name), tensor) for name, tensor in live.items()
                }

    def before_update(self) -> None:
        """Make the current CUDA stream wait for a copy under way; what it overwrites next has been read."""
        if self._copied is not None:
            self._copied.wait()

    @torch.no_grad()
    def restore(self, step: int) -> list[str]:
        """Put the values of `step` back bit for bit, forget later snapshots, and name the tensors born since.

        Those are not touched and are the caller's to drop: going back to before AdamW's first step leaves
        its state. Raises `DitLoraError`, with nothing changed, if `step` is not held or a tensor of its
        snapshot is alive no more or in another shape or dtype.
        """
        held, live = self.read(step), self._live()
        lost = [name for name, buffer in held.items() if not _fits(buffer, live.get(name))]
        # Looked at before anything is written: half of a step is worse than none.
        if lost:
            summary = (
                f"cannot go back to step {step}: of its tensors, these are no longer as they were"
            )
            raise DitLoraError(listed(summary, lost))
        for name, buffer in held.items():
            live[name].copy_(buffer)
        # What is no tensor was copied into one, and is written back from there.
        self._put({name: live[name] for name in held})
        # A later snapshot holds the very state that is left here.
        for later in [other for other in self._held if other > step]:
            self.forget(later)
        return [name for name in live if name not in held]

    def read(self, step: int) -> Tensors:
        """Return the snapshot, once the host may read it; its own buffers, which later snapshots overwrite."""
        self._require(step)
        if self._copied is not None:
            self._copied.synchronize()
        return self._held[step]

    def not_finite(self, step: int) -> list[str]:
        """Return the tensors of a held snapshot that are not finite; a step to go back to has none."""
        return [name for name, buffer in self.read(step).items() if not is_finite(buffer)]

    def peaks(self) -> dict[str, float]:
        """Return the largest magnitude of each tensor of the newest snapshot; empty while none is held."""
        return read_scalars(stacked_peaks(self.read(max(self._held)))) if self._held else {}

    def forget(self, step: int) -> None:
        """Hold the snapshot no more; its buffers are the next snapshot's."""
        self._require(step)
        self._spare.append(self._held.pop(step))

    def _live(self) -> Tensors:
        return {name: local(tensor) for name, tensor in self._state().items()}

    def _free_buffers(self, step: int) -> Tensors:
        """Return buffers that may be overwritten; while they are, no step is held in them."""
        # A step that is taken again has one snapshot, of its last time.
        if step in self._held:
            return self._held.pop(step)
        if self._spare:
            return self._spare.pop()
        return self._held.pop(min(self._held)) if len(self._held) == self._keep else {}

    @contextmanager
    def _aside(self, live: Tensors) -> Iterator[None]:
        """Queue CUDA copies behind the current stream's work and beside what it does next."""
        device = next((tensor.device for tensor in live.values() if tensor.is_cuda), None)
        if device is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        # The copy must see what the update before it has written.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied = self._stream.record_event()

    def _require(self, step: int) -> None:
        if step not in self._held:
            held = ", ".join(map(str, self.steps)) or "none"
            raise DitLoraError(f"no snapshot of step {step} is held; held: {held}")


def _copied_into(buffer: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values in the buffer if it fits, else in a new one, pinned for a CUDA tensor."""
    if buffer is None or not _fits(buffer, tensor):
        # Only into pinned memory can a copy run beside the computation.
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    buffer.copy_(tensor, non_blocking=True)
    if tensor.is_cuda:
        # Freed by its owner, its memory must not be handed out before this stream has read it.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return buffer


def _all_fit(buffers: Tensors, live: Tensors) -> bool:
    """True if every tensor is on the CPU and has a buffer that fits."""
    return all(
        tensor.device.type == "cpu" and name in buffers and _fits(buffers[name], tensor)
        for name, tensor in live.items()
    )


def _fits(buffer: torch.Tensor, tensor: torch.Tensor | None) -> bool:
    return tensor is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
