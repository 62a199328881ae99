"""A recorded model call as a micro-batch that a diagnosis can run again."""

from dataclasses import dataclass, replace

from torch import nn

from dit_lora.guard.attach.calls.call_rows import SampleExtractor
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.objectives import LossOutput


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedCallMicroBatch(MicroBatch):
    """A micro-batch made from a recorded model call of a loop. Its noise comes from the loop and cannot be redrawn."""

    call: CapturedCall
    model: nn.Module
    failed_call: CapturedCall | None
    """The call that failed in the step, whose random state a healthy call is run with; None if there is none."""
    cutter: SampleExtractor | None
    """Extracts single samples from the call; None if samples cannot be told apart."""

    @classmethod
    def from_call(
        cls,
        call: CapturedCall,
        model: nn.Module,
        *,
        step: int,
        micro_step: int,
        rank: int,
        failed_call: CapturedCall | None = None,
    ) -> "RecordedCallMicroBatch":
        cutter = call.get_sample_extractor()
        labels = call.collect_row_tensors().get("labels")
        return cls(
            ids=call.ids if cutter is not None else (),
            step=step,
            micro_step=micro_step,
            rank=rank,
            # Only labels: the caller checks the other inputs, since it knows which of them belong to a sample.
            tensors={"labels": labels} if labels is not None and cutter is not None else {},
            loss_is_sum=True,
            uses_autocast=bool(call.autocasts),
            call=call,
            model=model,
            failed_call=failed_call,
            cutter=cutter,
        )

    def forward(self) -> LossOutput:
        return self.call.compute_replay_losses(self.model)

    def select_sample(self, index: int) -> "RecordedCallMicroBatch":
        return self if self.cutter is None else self._replace_call(self.call.select_sample_row(index, self.cutter))

    def move_to_run_position(self, position: MicroBatch, *, copies_seeds: bool = False) -> "RecordedCallMicroBatch":
        # At its own position the call keeps its own random state.
        is_here = (position.step, position.micro_step) == (self.step, self.micro_step)
        if self.failed_call is None or is_here:
            return self
        moved = replace(
            self.call,
            random_state=self.failed_call.random_state,
            cuda_random_state=self.failed_call.cuda_random_state,
            generator=self.failed_call.generator,
        )
        return self._replace_call(moved)

    def _replace_call(self, call: CapturedCall) -> "RecordedCallMicroBatch":
        return self.from_call(
            call,
            self.model,
            step=self.step,
            micro_step=self.micro_step,
            rank=self.rank,
            failed_call=self.failed_call,
        )
