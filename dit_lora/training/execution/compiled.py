"""Compiles a model's blocks one by one by torch.compile: `train.compile`.

Blocks of one class share their code, so that a model is compiled at the cost of a few blocks; hooks, checkpointing and
offload stay around a block, outside of what is compiled. Each shape is compiled on its own (`dynamic=False`): what is
computed must not depend on the shapes that came before, or a resumed run would differ from one that went on.
"""

import atexit
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from accelerate import Accelerator
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils._triton import has_triton
from transformers.modeling_layers import GradientCheckpointingLayer

from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.guard.switches import COMPILE, Switch, model_switches, set_model_switches
from dit_lora.numerics.opaque import set_whole, whole_test
from dit_lora.training.execution.blocks import LAUNCHES, repeated_blocks

_BACKEND = "inductor"
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
# Dynamo turns most of what its tracer meets into exceptions of its own, not these (`_compile` in convert_frame.py of
# torch 2.11, 2.13 and 2.15); and code that it has traced wrongly fails, when run, with whatever Python raises there.
_UNWRAPPED = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NameError,
    TypeError,
    ValueError,
)
_SHAPES = 256  # graphs of one block's code; beyond torch's own 8 it would go on without them, and say so in a log


def compile_blocks(recipe: Recipe, transformer: nn.Module, accelerator: Accelerator) -> None:
    """Compile the model's repeated blocks if `train.compile` says so, at their first calls.

    Call it with adapter and kernels in place. What is compiled is kept in `<cache>/compile`, unless
    TORCHINDUCTOR_CACHE_DIR says otherwise, and found there by the next start. The model gets a switch, `compile`.
    Raises `DitLoraError` where the model or the machine cannot.
    """
    if not recipe.train.compile:
        return
    if accelerator.distributed_type not in LAUNCHES:
        raise DitLoraError(
            f"train.compile: not under {accelerator.distributed_type.value}, which gathers a block's weights when "
            "it is called; launch with accelerate_configs/ddp.yaml or in one process, or set it to false"
        )
    _require_compiler(accelerator.device)
    # Beside the encodings, for the next start to find; the temporary folder may be emptied in between.
    if os.environ.get(_CACHE) in (None, default_cache_dir()):  # torch sets it to that by itself
        os.environ[_CACHE] = _plain_path(recipe.cache_dir.absolute() / "compile")
    # Each bucket costs graphs of its own, and the limit is for all blocks that share one code.
    torch._dynamo.config.recompile_limit = max(_SHAPES, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.accumulated_recompile_limit = max(
        8 * _SHAPES, torch._dynamo.config.accumulated_recompile_limit
    )
    # Dropout draws what it draws in eager mode: what is compiled can be compared, and is the same training.
    torch._inductor.config.fallback_random = True
    # A block's backward is compiled with its forward: what cannot be is known at the block's first call.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    state = _State()
    for block in repeated_blocks(transformer):
        if isinstance(block, GradientCheckpointingLayer):
            _compile_layer(block, state)
        else:
            block.forward = _switched(block.forward, state)
        # Probes hook the parts of a block, and compiled code calls none: the guard has to be told.
        set_whole(block, partial(_either, state, whole_test(block)))
    switch = Switch(COMPILE, "kernel", state.off, state.turn_off, "eager mode")
    # For the guard: a fault in compiled code is told from one in the model by running it eager.
    set_model_switches(transformer, [*model_switches(transformer), switch])


def _plain_path(folder: Path) -> str:
    """Return the folder by a name that needs no quotes: inductor's compiler command line has it as it is."""
    if shlex.quote(str(folder)) == str(folder):
        return str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for parent in dict.fromkeys([tempfile.gettempdir(), *_PLACES]):
        if shlex.quote(parent) == parent and os.access(parent, os.W_OK):
            aside = tempfile.mkdtemp(prefix="dit_lora_compile_", dir=parent)  # of this user alone
            atexit.register(shutil.rmtree, aside, ignore_errors=True)
            link = Path(aside, "cache")
            link.symlink_to(folder, target_is_directory=True)
            return str(link)
    raise DitLoraError(
        f"train.compile: compilers cannot take the path {folder}; set data.cache to one of plain letters, or "
        f"{_CACHE}"
    )


class _State:
    """Holds whether the compiled blocks are used."""

    def __init__(self) -> None:
        self.on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    def turn_off(self) -> None:
        self.on = False


def _switched(eager: Callable[..., Any], state: _State) -> Callable[..., Any]:
    compiled = torch.compile(eager, dynamic=False, backend=_BACKEND)

    @wraps(eager)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not state.on:
            return eager(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            raise _cannot(error) from error
        except _UNWRAPPED as error:
            # The block's own error comes without compilation too, and goes on as it is.
            eager(*args, **kwargs)
            raise _cannot(error) from error

    return forward


def _cannot(error: Exception) -> DitLoraError:
    """Return the one line that says why a block cannot be compiled."""
    # Dynamo's errors are pages; their first line says what it cannot do, or that the next one does.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return DitLoraError(
        f"train.compile: torch {torch.__version__} cannot compile a block: "
        f"{type(error).__name__}: {reason}; set it to false"
    )


def _compile_layer(layer: GradientCheckpointingLayer, state: _State) -> None:
    """Compile a layer of Transformers beneath its checkpointing, which is called inside of its class's forward.

    The layer gets a class of its own, as in FSDP2: the layer's base wraps each class's forward, and the outermost one
    alone checkpoints (in Transformers 5.0, `__call__` does).
    """
    stock = type(layer)
    # The forward without its checkpointing, whose state would be compiled in.
    forward = _switched(getattr(stock.forward, "__wrapped__", stock.forward), state)
    layer.__class__ = type(stock.__name__, (stock,), {"forward": forward})


def _either(state: _State, whole: Callable[[], bool] | None) -> bool:
    """Return true if the block computes as one: a compiled block runs none of its parts, nor do some fused ones."""
    return state.on or (whole is not None and whole())


def _require_compiler(device: torch.device) -> None:
    """Raise `DitLoraError` without the tool that inductor needs: Triton on a GPU, a C++ compiler elsewhere."""
    if device.type == "cuda":
        if not has_triton():
            raise DitLoraError(
                "train.compile: Triton cannot be used with this GPU; install triton, or set it to false"
            )
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise DitLoraError(
            "train.compile: there is no C++ compiler; install g++ (CXX names another), or set it to false"
        ) from error
