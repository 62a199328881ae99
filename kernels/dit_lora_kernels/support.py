"""Detects whether Triton kernels can run, replaces Triton's decorators if it is not installed, and holds shared
helpers.
"""

import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn


def _import_if_installed(module: str) -> Any:
    """Import a module; None if it is not installed."""
    try:
        return import_module(module)
    except ImportError:  # references and CPU paths work without it
        return None


# Without Triton the kernels below are never launched, but the modules that define them must still import: `jit`
# leaves a function as it is, and `constexpr` need only be something that an annotation can name.
triton: Any = _import_if_installed("triton") or SimpleNamespace(jit=lambda kernel: kernel)
tl: Any = _import_if_installed("triton.language") or SimpleNamespace(constexpr=object)


class Support(NamedTuple):
    """How kernels can run here: `mode` is gpu, interpreter or none, with the versions or the reason."""

    mode: str
    reason: str


def triton_support() -> Support:
    """What Triton can do in this process, judged by its version and the device; compiles nothing."""
    if isinstance(triton, SimpleNamespace):
        return Support("none", "triton is not installed")
    version = importlib.metadata.version("triton")
    if triton.knobs.runtime.interpret:
        return Support("interpreter", f"triton {version} with TRITON_INTERPRET=1, for tests")
    if not torch.cuda.is_available():
        return Support("none", f"triton {version} finds no GPU")
    return Support("gpu", f"triton {version} on {torch.cuda.get_device_name()}")


def launches(tensor: Tensor) -> bool:
    """True if a kernel runs on this tensor's device: on a GPU, or anywhere in Triton's interpreter."""
    if isinstance(triton, SimpleNamespace):
        return False
    return tensor.is_cuda or bool(triton.knobs.runtime.interpret)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that an op computes and sums in: fp64 for fp64 inputs, else fp32."""
    # fp64 is there for gradcheck, whose finite differences drown in fp32's rounding.
    return torch.float64 if dtype is torch.float64 else torch.float32


def accumulation_triton_dtype(dtype: torch.dtype) -> Any:
    """`accumulation_dtype(dtype)` as a kernel's compile-time argument, a Triton dtype."""
    return tl.float64 if accumulation_dtype(dtype) is torch.float64 else tl.float32


def cdiv(dividend: int, divisor: int) -> int:
    """Divide and round up."""
    # Triton's own also runs in kernels, and takes 5 to 10 us of the host for that.
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


# A tensor, or one that may be missing: what comes in missing goes out missing, and the type says which.
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def make_rows_contiguous(tensor: MaybeTensor) -> MaybeTensor:
    """The tensor itself if its last dimension is contiguous, else a contiguous copy; any shape, any dtype.

    Kernels take every stride but the last, which they assume to be 1.
    """
    # A last dimension of one element may have any stride: nothing is ever multiplied by it.
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


def make_contiguous(tensor: MaybeTensor) -> MaybeTensor:
    """The tensor itself if it is contiguous, else a contiguous copy; any shape, any dtype."""
    return None if tensor is None else tensor.contiguous()


# A TensorLayout's fields, compared and hashed like it, and made in half the time.
PlainLayout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]


def get_layout_tuple(tensor: Tensor) -> PlainLayout:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


class TensorLayout(NamedTuple):
    """Everything about a tensor except its memory's address and its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device


def get_layout(tensor: Tensor) -> TensorLayout:
    return TensorLayout._make(get_layout_tuple(tensor))


# Versions whose compiled kernels were seen to take all of a kernel's arguments, the compile-time ones in their places.
_TESTED_TRITON_VERSIONS = ((3, 6), (3, 9))


@functools.cache
def _can_reuse_compiled() -> bool:
    """True if a compiled kernel may be called without Triton's own lookup: in the versions that were tested."""
    version = tuple(int(part) for part in getattr(triton, "__version__", "0.0").split(".")[:2])
    return _TESTED_TRITON_VERSIONS[0] <= version <= _TESTED_TRITON_VERSIONS[1]


class Prepared:
    """A kernel launch that is prepared except for its tensors: call it with these, in order, None for a missing one.

    Dtypes and missing tensors must be the same in every call. What else Triton specializes on is checked here: the
    device, and whether addresses are multiples of 16. Triton itself would check everything at each launch.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[int, ...], constants: dict[str, Any]
    ) -> None:
        """Store the arguments after the tensors: whole numbers in order, then compile-time arguments by name."""
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        # By device and address alignment of the tensors: the compiled kernel, and the arguments after the tensors.
        self._compiled: dict[tuple[int | None, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the first tensor's device: Triton uses the current device, whatever the pointers are."""
        assert tensors[0] is not None
        index = tensors[0].get_device()
        if index >= 0 and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(*tensors)
            return
        specialization = (index, *[None if t is None else t.data_ptr() % 16 for t in tensors])
        cached = self._compiled.get(specialization)
        if cached is not None:
            run, other_arguments = cached
            run(*tensors, *other_arguments)
            return
        numbers, constants = self._numbers, self._constants
        compiled = self._kernel[self._grid](*tensors, *numbers, **constants)
        # The interpreter compiles nothing, and returns None.
        if compiled is None or not _can_reuse_compiled():
            return
        names = self._kernel.arg_names[len(tensors) + len(numbers) :]
        other_arguments = (*numbers, *(constants[name] for name in names))
        self._compiled[specialization] = (compiled[self._grid + (1,) * (3 - len(self._grid))], other_arguments)


# Launches by everything except the tensors, with the number of tensor arguments. Bounded, because each new shape adds
# an entry.
_LAUNCHES: dict[tuple[Any, ...], tuple[Prepared, int]] = {}
_MAX_CACHED_LAUNCHES = 8192


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Do what `kernel[grid](*args, **constants)` does; a second launch of the same shape calls the compiled kernel.

    `args` are the arguments that are not compile-time, in order: a tensor, then tensors or None, then whole numbers.
    """
    dtypes = [arg if arg is None or type(arg) is int else arg.dtype for arg in args]
    key = (kernel, grid, *constants.values(), *dtypes)
    cached = _LAUNCHES.get(key)
    if cached is None:
        count = next((i for i, arg in enumerate(args) if type(arg) is int), len(args))
        if len(_LAUNCHES) >= _MAX_CACHED_LAUNCHES:
            _LAUNCHES.clear()
        prepared = Prepared(kernel, grid, args[count:], constants)
        cached = _LAUNCHES[key] = prepared, count
    prepared, count = cached
    prepared(*args[:count])


def apply_plainly(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)` without its check of each argument for transforms; no transform may be active."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def is_eager_without_transforms() -> bool:
    """True if `apply_plainly` may be called: nothing is being compiled, and no transform is active."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


class Op:
    """An op of torch.library that is bypassed if nothing could see the difference.

    Dispatch in torch.library takes more host time than a launch. It is still used for tracing, fake tensors, dispatch
    modes (the guard's probe, a checkpoint's policy), transforms, other devices, and names in a profile.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.function = function
        """The implementation, of tensors, lists of them, and plain values."""
        self.library: Any = torch.library.custom_op(
            f"dit_lora::{name}", function, mutates_args=(), device_types=("cpu", "cuda")
        )
        self._node: Any = None

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Register the op's result for fake tensors."""
        return self.library.register_fake(fake)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Register the gradient, with torch.library's interface, for both paths."""
        self.library.register_autograd(backward, setup_context=setup_context)
        function = self.function

        class Node(torch.autograd.Function):
            """The op's node in the autograd graph when torch.library is bypassed."""

            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                output = function(*args)
                setup_context(ctx, args, output)
                return output

        Node.backward = staticmethod(backward)  # type: ignore[assignment]
        self._node = Node

    def __call__(self, *args: Any) -> Any:
        """Compute the op's outputs."""
        if torch.compiler.is_compiling() or _must_go_through_op(args):
            return self.library(*args)
        if not (torch.is_grad_enabled() and _requires_grad(args)):
            return self.function(*args)
        # Without a node, differentiated all the same, it is torch.library that says so.
        return self.library(*args) if self._node is None else apply_plainly(self._node, *args)


def op(name: str) -> Callable[[Callable[..., Any]], Op]:
    """Register the function as `dit_lora::name`: it returns new tensors, changes none, and runs on CPU and CUDA."""
    return functools.partial(Op, name)


# Exactly these: a subclass (fake, DTensor, a trace's) says itself what a call of an op means.
_PLAIN_TYPES = (Tensor, nn.Parameter)


def _must_go_through_op(args: tuple[Any, ...]) -> bool:
    """True if a call with these arguments must go through the op: it is traced, or an argument is not a plain
    tensor.
    """
    if _is_traced():
        return True
    for arg in args:
        for leaf in arg if type(arg) is list else (arg,):
            if type(leaf) in _PLAIN_TYPES:
                # A negated view has other values in its memory; elsewhere (meta, other devices) nothing is registered.
                if not (leaf.is_cuda or leaf.is_cpu) or leaf.is_neg():
                    return True
            elif isinstance(leaf, Tensor):
                return True
    return False


def _is_traced() -> bool:
    """True if something observes each op that is called."""
    # None of these four has a public name; modes and profile are what `torch.library` itself looks at.
    private = torch._C
    return bool(
        private._len_torch_dispatch_stack()
        or private._are_functorch_transforms_active()
        or private._get_tracing_state() is not None
        or private._autograd._profiler_enabled()
    )


def get_plain_layouts(tensors: Sequence[Tensor | None]) -> tuple[PlainLayout | None, ...] | None:
    """The tensors' layouts; None if a call with them must go through the op (see `Op`)."""
    if _is_traced():
        return None
    layouts: list[PlainLayout | None] = []
    for tensor in tensors:
        if tensor is None:
            layouts.append(None)
        elif type(tensor) in _PLAIN_TYPES and (tensor.is_cuda or tensor.is_cpu) and not tensor.is_neg():
            layouts.append((tensor.dtype, tensor.shape, tensor.stride(), tensor.device))
        else:
            return None
    return tuple(layouts)


def _requires_grad(args: tuple[Any, ...]) -> bool:
    """True if any of the tensors requires a gradient."""
    for arg in args:
        for leaf in arg if type(arg) is list else (arg,):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                return True
    return False


@functools.cache
def get_row_block(channels: int) -> dict[str, int]:
    """A row's block size and number of warps."""
    # 16 values a thread are two 16-byte loads of bf16.
    block = next_power_of_2(channels)
    return {"BLOCK_D": block, "num_warps": min(max(block // 512, 1), 16)}


@functools.cache
def get_row_block_options(channels: int, dtype: torch.dtype, sums: bool) -> dict[str, int]:
    """A row's block size, its number of warps, and the number of rows that are loaded or summed at a time."""
    block = get_row_block(channels)
    if not sums:
        return block | {"STAGES": 1}
    # 8 values per thread, as three sums are in registers too. Shared memory has at most four rows, and as many again.
    size = 4 * block["BLOCK_D"] * dtype.itemsize
    stages = 3 if size <= 2**15 else 2 if size <= 2**17 else 1
    return block | {"num_warps": min(max(block["BLOCK_D"] // 256, 1), 32), "STAGES": stages}
