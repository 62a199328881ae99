"""The surroundings of a loop that is not ours: Accelerate, or nobody, in plain PyTorch."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed, nn

from dit_lora.errors import DitLoraError
from dit_lora.numerics.ranks import gather_object, process_count, process_index
from dit_lora.patching import is_a

if TYPE_CHECKING:  # the guard needs torch alone
    from accelerate import Accelerator

T = TypeVar("T")


class Host:
    """Facts about the loop's surroundings; `accelerator` is None in plain PyTorch."""

    def __init__(self, accelerator: "Accelerator | None", device: torch.device) -> None:
        if accelerator is not None and not is_a(accelerator, "accelerate:Accelerator"):
            raise DitLoraError(
                "Guard.attach: the first argument is an accelerate.Accelerator, or None for a loop in plain "
                f"PyTorch; got {type(accelerator).__name__}"
            )
        self.accelerator = accelerator
        self._rank = process_index()
        self.device = accelerator.device if accelerator is not None else device

    @property
    def ranks(self) -> int:
        return process_count()

    @property
    def rank(self) -> int:
        # A loop may end its process group before the guard has said all.
        self._rank = max(self._rank, process_index())
        return self._rank

    @property
    def syncs_gradients(self) -> bool:
        """True if this backward is the last before an optimizer's step; a plain loop steps only then."""
        return self.accelerator is None or self.accelerator.sync_gradients

    @property
    def scaler(self) -> Any | None:
        """Accelerate's gradient scaler; a plain loop has its own, which never calls the optimizer in vain."""
        return self.accelerator.scaler if self.accelerator is not None else None

    @property
    def under_deepspeed(self) -> bool:
        # A DistributedType of Accelerate's, which is a string.
        return self.accelerator is not None and self.accelerator.distributed_type == "DEEPSPEED"

    @property
    def folder(self) -> Path:
        """The folder that the loop writes to, as far as Accelerate knows."""
        project = self.accelerator.project_dir if self.accelerator is not None else None
        return Path(project) if project is not None else Path("dit_lora_guard")

    def models(self, given: Sequence[nn.Module]) -> list[nn.Module]:
        """Return those given and those that Accelerate has prepared, bare, each once."""
        prepared = self.accelerator._models if self.accelerator is not None else []
        bare = [bare_model(model) for model in [*given, *prepared]]
        return list({id(model): model for model in bare}.values())

    def prepared(self, optimizer: Any) -> Any:
        """Return Accelerate's wrapper of this optimizer, which the loop steps; without one the optimizer itself."""
        wrappers = self.accelerator._optimizers if self.accelerator is not None else []
        # The loop steps the wrapper: it is the wrapper's method that has to be watched.
        return next((wrapper for wrapper in wrappers if wrapper.optimizer is optimizer), optimizer)

    def summed(self, flags: torch.Tensor) -> list[float]:
        """Return flags summed over ranks, by one read of the device; collective."""
        if self.ranks > 1:
            distributed.all_reduce(flags)
        return flags.tolist()

    def any_rank(self, flag: bool | torch.Tensor) -> bool:
        return bool(self.summed(torch.as_tensor(flag, device=self.device).float().reshape(1))[0])

    def gathered(self, objects: Sequence[T]) -> list[T]:
        """Return what all ranks have, in the order of ranks; collective."""
        return gather_object(list(objects))


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model without DDP around it."""
    if "accelerate" not in sys.modules:
        while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        return model
    from accelerate.utils import extract_model_from_parallel

    # With its autocast and compilation: a replay must run what the loop runs.
    bare: nn.Module = extract_model_from_parallel(
        model, keep_fp32_wrapper=True, keep_torch_compile=True
    )
    return bare
