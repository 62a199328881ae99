"""Predicts the seconds of a step: what it gives a device to do, over what that device reaches.

The device's time is a sum over products, attention and the bytes of all other ops; the host's is ops times what one
takes. On a GPU they run beside each other, and the longer one counts; on a CPU they are added. The exchange between
ranks, waiting for data, and what comes every so many steps are not in it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dit_lora.environment.ceilings import Ceilings, load_ceilings
from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.guard.switches import eager
from dit_lora.numerics.streams import Streams
from dit_lora.planning.measure import device_name
from dit_lora.planning.work import Work
from dit_lora.training.execution.fake_step import FakeStep
from dit_lora.training.preserve import trained_losses
from dit_lora.training.task import AnySetup

FILE = "prediction.json"
_UPDATE = 11
"""Passes over trained weights, their gradients and moments in an update: AdamW reads four and writes three, norms, clip
and the guard's check read or write four more."""

_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    LookupError,
    DitLoraError,
)
"""Raised by an op that takes no tensors without values, a model that reads one, and a file that is not ours: no run ends by
its prediction."""


@dataclass(frozen=True)
class Speed:
    """A predicted step."""

    parts: Mapping[str, float]
    """Seconds of the device."""
    host: float
    """Seconds in which the host launches it."""
    together: bool
    """True if host and device work at the same time."""
    source: str
    """The origin of the rates, in words."""

    @property
    def seconds(self) -> float:
        device = sum(self.parts.values())
        return max(device, self.host) if self.together else device + self.host

    @property
    def words(self) -> str:
        bound = ", bound by the host" if self.together and self.seconds == self.host else ""
        return f"{self.seconds:.3g} s a step{bound}, by {self.source}"

    def record(self) -> dict[str, Any]:
        """Return what plans print and runs keep."""
        parts = {name: float(f"{value:.4g}") for name, value in self.parts.items()}
        return {
            "seconds": float(f"{self.seconds:.4g}"),
            "device": parts,
            "host": float(f"{self.host:.4g}"),
            "source": self.source,
        }


def speed_of(work: Work, ceilings: Ceilings, *, micro_steps: int, trained: int, gpu: bool) -> Speed:
    """Return the speed of so many micro-steps of this work, and an update of so many bytes of trained weights."""
    products = sum(flops / ceilings.product(dtype) for dtype, flops in work.products.items())
    attention = 0.0
    for (masked, backward), flops in work.attention.items():
        rates = ceilings.attend(masked=masked)
        attention += flops / (rates.backward if backward else rates.forward)
    parts = {
        "products": micro_steps * products,
        "attention": micro_steps * attention,
        "other ops": micro_steps * work.bytes / ceilings.copy,
        "update": _UPDATE * trained / ceilings.copy,
    }
    return Speed(parts, micro_steps * work.ops * ceilings.launch, gpu, ceilings.source)


def predict_run(setup: AnySetup) -> Speed | None:
    """Predict a run's step as it is set up, checkpointing and kernels included; None where nothing was measured here.

    Counted on tensors without values. Raises as `FakeStep.run`.
    """
    device = setup.session.accelerator.device
    ceilings = load_ceilings(device_name(device))
    if ceilings is None:
        return None
    train, (_, spec) = setup.recipe.train, setup.data.clips.largest
    size = train.batch_size
    batch = {name: (torch.Size([size, *shape]), dtype) for name, (shape, dtype) in spec.items()}
    known = {n: t.expand(size, *t.shape) for n, t in setup.data.clips.known().items()}
    streams = Streams(train.seed, range(size))
    step = FakeStep(setup.transformer.train(), batch, known, device)

    def compute(model: torch.nn.Module, tensors: Any) -> None:
        trained_losses(setup.checkpoint, model, tensors, streams).losses.mean().backward()

    with setup.engine.alone(), eager(setup.transformer), Work() as work:
        step.run(compute)
    trained = sum(p.nbytes for p in setup.transformer.parameters() if p.requires_grad)
    return speed_of(
        work, ceilings, micro_steps=train.accumulate, trained=trained, gpu=device.type == "cuda"
    )


def write_prediction(setup: AnySetup) -> None:
    """Say and keep in the run's folder what a step will take, for its report; nothing where nothing was measured here."""
    session = setup.session
    # Ranks that share weights or tokens compute together; only what one rank does is counted.
    if session.accelerator.num_processes > 1:
        return
    try:
        speed = predict_run(setup)
    except _FAILURES as error:
        session.say(
            f"no prediction: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        )
        return
    if speed is not None:
        session.say(f"predicted: {speed.words}")
        write_whole(session.dir / FILE, json.dumps(speed.record()) + "\n")
