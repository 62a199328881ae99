"""Compiles a model's blocks one by one with torch.compile: `train.compile`.

Blocks of one class share their code, so a model costs the compilation of a few blocks. Hooks, checkpointing and
offload stay outside the compiled code. Each shape is compiled separately (`dynamic=False`): results must not depend on
earlier shapes, or a resumed run would differ from an uninterrupted one.
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
from dit_lora.guard.fallbacks import COMPILE, Fallback, list_model_fallbacks, set_model_fallbacks
from dit_lora.numerics.opaque import get_fused_module_test, set_fused_module_test
from dit_lora.numerics.transformer_blocks import WHOLE_BLOCK_LAUNCHES, repeated_blocks

_BACKEND = "inductor"
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_FALLBACK_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
# Dynamo wraps most errors of its tracer in its own exceptions, but not these (`_compile` in convert_frame.py of torch
# 2.11, 2.13 and 2.15). Code that was traced wrongly raises any Python error when it runs.
_UNWRAPPED_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, NameError, TypeError, ValueError)
# Graphs per block's code; beyond torch's default of 8 it would silently run eager.
_MAX_GRAPHS_PER_BLOCK = 256


def compile_blocks(recipe: Recipe, transformer: nn.Module, accelerator: Accelerator) -> None:
    """Compile the model's repeated blocks if `train.compile` is set, at their first calls.

    Adapter and kernels must be in place. Compiled code is cached in `<cache>/compile`, unless TORCHINDUCTOR_CACHE_DIR
    says otherwise, and found there by the next start. The model gets a fallback switch, `compile`. Raises
    `DitLoraError` if the launch or the machine does not support it.
    """
    if not recipe.train.compile:
        return
    if accelerator.distributed_type not in WHOLE_BLOCK_LAUNCHES:
        raise DitLoraError(
            f"train.compile does not work with {accelerator.distributed_type.value}; launch with "
            "accelerate_configs/ddp.yaml or in one process, or set it to false"
        )
    _require_compiler(accelerator.device)
    # Next to the encodings: the temporary folder may be emptied. Torch's own default counts as not set.
    if os.environ.get(_CACHE_VARIABLE) in (None, default_cache_dir()):
        os.environ[_CACHE_VARIABLE] = _make_path_without_quotes(recipe.cache_dir.absolute() / "compile")
    # Each bucket needs its own graphs, and the limit is for all blocks that share one code.
    limits = torch._dynamo.config
    limits.recompile_limit = max(_MAX_GRAPHS_PER_BLOCK, limits.recompile_limit)
    limits.accumulated_recompile_limit = max(8 * _MAX_GRAPHS_PER_BLOCK, limits.accumulated_recompile_limit)
    # Dropout draws the numbers of eager mode, so that compiled and eager training can be compared.
    torch._inductor.config.fallback_random = True
    # Compile backward together with forward: a failure shows at the block's first call.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    # One switch for all blocks, which the guard can turn off.
    state = _CompileSwitch()
    for block in repeated_blocks(transformer):
        if isinstance(block, GradientCheckpointingLayer):
            # Beneath the checkpointing, whose state would be compiled in: the base class wraps each class's forward,
            # and only the outermost one checkpoints (in Transformers 5.0, `__call__` does). So the layer gets its own
            # class, as in FSDP2.
            layer_class = type(block)
            forward = _compile_forward(getattr(layer_class.forward, "__wrapped__", layer_class.forward), state)
            block.__class__ = type(layer_class.__name__, (layer_class,), {"forward": forward})
        else:
            block.forward = _compile_forward(block.forward, state)
        # Probes hook the parts of a block, but compiled code calls none of them: tell the guard.
        set_fused_module_test(block, partial(_is_called_as_one_module, state, get_fused_module_test(block)))
    switch = Fallback(COMPILE, "kernel", state.disable_temporarily, state.disable_compiled_blocks, "eager mode")
    # For the guard: running eager separates a fault of compiled code from one of the model.
    set_model_fallbacks(transformer, [*list_model_fallbacks(transformer), switch])


def _make_path_without_quotes(folder: Path) -> str:
    """A path to the compile cache that needs no quotes: inductor puts it unquoted on the compiler's command line."""
    if shlex.quote(str(folder)) == str(folder):
        return str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for parent in dict.fromkeys([tempfile.gettempdir(), *_FALLBACK_FOLDERS]):
        # The link's own folder must have a plain path too.
        if shlex.quote(parent) == parent and os.access(parent, os.W_OK):
            # `mkdtemp` makes a folder that only this user can read.
            aside = tempfile.mkdtemp(prefix="dit_lora_compile_", dir=parent)
            atexit.register(shutil.rmtree, aside, ignore_errors=True)
            # A symbolic link with a plain name; the cache itself stays where the recipe puts it.
            link = Path(aside, "cache")
            link.symlink_to(folder, target_is_directory=True)
            return str(link)
    raise DitLoraError(
        f"train.compile: compilers do not accept the path {folder}; set data.cache to a path with plain "
        f"letters, or set {_CACHE_VARIABLE}"
    )


class _CompileSwitch:
    """State of a compiled model: whether its compiled blocks are in use."""

    def __init__(self) -> None:
        self.is_on = True

    @contextmanager
    def disable_temporarily(self) -> Iterator[None]:
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def disable_compiled_blocks(self) -> None:
        self.is_on = False


def _compile_forward(eager_forward: Callable[..., Any], state: _CompileSwitch) -> Callable[..., Any]:
    compiled = torch.compile(eager_forward, dynamic=False, backend=_BACKEND)

    @wraps(eager_forward)
    def switched_forward(*args: Any, **kwargs: Any) -> Any:
        if not state.is_on:
            return eager_forward(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            raise _make_compile_error(error) from error
        except _UNWRAPPED_ERRORS as error:
            # The block's own error also occurs without compilation, and is raised unchanged here.
            eager_forward(*args, **kwargs)
            raise _make_compile_error(error) from error

    return switched_forward


def _make_compile_error(error: Exception) -> DitLoraError:
    # Dynamo's errors are pages long; the first line, or the next if it ends with a colon, has the reason.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return DitLoraError(
        f"train.compile: torch {torch.__version__} cannot compile a block: "
        f"{type(error).__name__}: {reason}; set it to false"
    )


def _is_called_as_one_module(state: _CompileSwitch, is_whole: Callable[[], bool] | None) -> bool:
    """True if the block computes as one unit: a compiled block calls none of its parts, nor do some fused ones."""
    return state.is_on or (is_whole is not None and is_whole())


def _require_compiler(device: torch.device) -> None:
    """Raise `DitLoraError` if inductor's tool is missing: Triton on a GPU, a C++ compiler elsewhere."""
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
