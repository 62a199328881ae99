"""The surroundings of a loop that is not ours: Accelerate, or nobody, in plain PyTorch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, extract_model_from_parallel
from torch import distributed, nn

from dit_lora.errors import DitLoraError

T = TypeVar("T")


class Host:
    """Facts about the loop's surroundings; `accelerator` is None in plain PyTorch."""

    def __init__(self, accelerator: Accelerator | None, device: torch.device) -> None:
        if accelerator is not None and not isinstance(accelerator, Accelerator):
            raise DitLoraError(
                "Guard.attach: the first argument is an accelerate.Accelerator, or None for a loop in plain "
                f"PyTorch; got {type(accelerator).__name__}"
            )
        self.accelerator = accelerator
        self.device = accelerator.device if accelerator is not None else device

    @property
    def ranks(self) -> int:
        if self.accelerator is not None:
            return self.accelerator.num_processes
        return distributed.get_world_size() if _spread() else 1

    @property
    def rank(self) -> int:
        if self.accelerator is not None:
            return self.accelerator.process_index
        return distributed.get_rank() if _spread() else 0

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
        kind = self.accelerator.distributed_type if self.accelerator is not None else None
        return kind is DistributedType.DEEPSPEED

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
        if self.ranks == 1:
            return list(objects)
        of_ranks: list[Any] = [None] * self.ranks
        distributed.all_gather_object(of_ranks, list(objects))
        return [item for of_rank in of_ranks for item in of_rank]


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model without DDP around it."""
    # With its autocast and compilation: a replay must run what the loop runs.
    bare: nn.Module = extract_model_from_parallel(
        model, keep_fp32_wrapper=True, keep_torch_compile=True
    )
    return bare


def _spread() -> bool:
    return distributed.is_available() and distributed.is_initialized()
