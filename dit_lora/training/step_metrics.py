"""Gathers every rank's metrics of a step with one collective."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate import Accelerator

from dit_lora.numerics.dtensors import get_local_tensor


class StepMetrics(NamedTuple):
    """Metrics of one rank's step, as a row of doubles in the order of the fields.

    The first four fields are computed on the device, the last three on the host.
    """

    losses: torch.Tensor
    """(ranks, samples) per-sample losses, in the order of micro-steps."""
    timesteps: torch.Tensor
    """(ranks, samples) timesteps, as doubles."""
    flags: torch.Tensor
    """(ranks, micro-steps + 3): the gate's `local_flags`, then whether a weight is not finite after the update."""
    norms: torch.Tensor
    """(ranks, groups + 1): gradient norms of the groups, then of all together; equal on all ranks."""
    bad_data: torch.Tensor
    """(ranks, micro-steps): 1 where a sample is bad, or the loop's mark for data that was not read."""
    data_seconds: torch.Tensor
    """(ranks, 1): seconds spent waiting for data."""
    stop_codes: torch.Tensor
    """(ranks, 1): the exit code with which a rank was asked to stop, or 0."""

    def start_gather(self, accelerator: Accelerator) -> "PendingMetrics":
        """Start sending the metrics rows of all ranks to the host, with one gather and one asynchronous copy.

        Collective.
        """
        device = self.losses.device
        # One asynchronous copy for all values from the host.
        host_values = torch.cat(self[4:], dim=1).to(device, non_blocking=True)
        # (1, width): this rank's row, all fields side by side.
        row = torch.cat([*self[:4], host_values], dim=1)
        widths = tuple(part.shape[1] for part in self)
        gathered: torch.Tensor = accelerator.gather(row)
        if not gathered.is_cuda:
            return PendingMetrics(gathered, widths)
        # Pinned memory: a copy started only when the host reads it would wait for everything queued until then.
        host_rows = torch.empty_like(gathered, device="cpu", pin_memory=True)
        host_rows.copy_(gathered, non_blocking=True)
        arrived = torch.cuda.current_stream(gathered.device).record_event()
        return PendingMetrics(host_rows, widths, arrived)


@dataclass(frozen=True)
class PendingMetrics:
    """The metrics rows of all ranks on their way to the host."""

    rows: torch.Tensor
    field_widths: tuple[int, ...]
    arrival_event: torch.cuda.Event | None = None

    def wait_until_arrived(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the metrics rows; returns whether they have arrived."""
        # Polled, because waiting for a CUDA event has no timeout.
        ends = time.monotonic() + timeout_s
        while self.arrival_event is not None and not self.arrival_event.query():
            if time.monotonic() > ends:
                return False
            time.sleep(0.01)
        return True

    def read_gathered_metrics(self) -> StepMetrics:
        """Block until the metrics rows have arrived. Does not wait for work queued after them."""
        if self.arrival_event is not None:
            self.arrival_event.synchronize()
        return StepMetrics(*self.rows.cpu().split(self.field_widths, dim=1))


def build_local_metrics(
    losses: Sequence[torch.Tensor],
    timesteps: Sequence[torch.Tensor],
    norms: Mapping[str, torch.Tensor],
    flags: torch.Tensor,
    has_bad_weights: torch.Tensor,
    bad_data: Sequence[float],
    data_seconds: float,
    stop_code: int,
) -> StepMetrics:
    """Build this rank's metrics row of a step.

    The last entry of `norms` is the norm over all groups. `flags` are the `local_flags` of the step's `Gate`, so that
    the host decides by the values that gated the optimizer. `has_bad_weights` is true if a weight is not finite.
    """
    # (groups + 1,)
    stacked = torch.stack([get_local_tensor(norm) for norm in norms.values()])
    # Each field is (1, width), in double so that all fit into one row.
    return StepMetrics(
        torch.cat([*losses]).double()[None],
        torch.cat([*timesteps]).double()[None],
        torch.cat([flags, has_bad_weights[None]]).double()[None],
        stacked.double()[None],
        torch.tensor([[*bad_data]], dtype=torch.float64),
        torch.tensor([[data_seconds]], dtype=torch.float64),
        torch.tensor([[stop_code]], dtype=torch.float64),
    )
