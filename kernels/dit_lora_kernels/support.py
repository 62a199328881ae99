"""Shared helpers of the kernels: is Triton usable here, cached kernel launches, and ops with a fast path.

Terms:

- Launch: one call of a Triton kernel on a grid of programs. `Prepared` is a launch whose arguments are fixed except
  for its tensors.
- Layout: a tensor's dtype, shape, strides and device: everything but its address and values.
- Op: a function registered with torch.library, so that PyTorch's tracers and modes see it. `Op` has a fast path, which
  calls the function directly when nothing would see the difference.

Without Triton the kernels' modules still import: its decorators are replaced by ones that do nothing.
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
    """Import a module; return None if it is not installed."""
    try:
        return import_module(module)
    except ImportError:  # references and CPU paths work without it
        return None


# Without Triton the kernels below are never launched, but the modules that define them must still import: `jit`
# leaves a function as it is, and `constexpr` need only be something that an annotation can name.
triton: Any = _import_if_installed("triton") or SimpleNamespace(jit=lambda kernel: kernel)
tl: Any = _import_if_installed("triton.language") or SimpleNamespace(constexpr=object)


class Support(NamedTuple):
    """How Triton kernels can run in this process.

    `mode` is "gpu", "interpreter" or "none". `reason` has the versions and the device, or why kernels cannot run.
    """

    mode: str
    reason: str


def triton_support() -> Support:
    """Find out whether Triton kernels can run in this process, from its version and the device; compiles nothing."""
    if isinstance(triton, SimpleNamespace):
        return Support("none", "triton is not installed")
    version = importlib.metadata.version("triton")
    if triton.knobs.runtime.interpret:
        return Support("interpreter", f"triton {version} with TRITON_INTERPRET=1, for tests")
    if not torch.cuda.is_available():
        return Support("none", f"triton {version} finds no GPU")
    return Support("gpu", f"triton {version} on {torch.cuda.get_device_name()}")


def launches(tensor: Tensor) -> bool:
    """True if a Triton kernel can run on this tensor: it is on a GPU, or Triton's interpreter is on."""
    if isinstance(triton, SimpleNamespace):
        return False
    return tensor.is_cuda or bool(triton.knobs.runtime.interpret)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a kernel computes and sums in: fp64 for fp64 inputs, else fp32."""
    # fp64 is there for gradcheck, whose finite differences drown in fp32's rounding.
    return torch.float64 if dtype is torch.float64 else torch.float32


def accumulation_triton_dtype(dtype: torch.dtype) -> Any:
    """`accumulation_dtype(dtype)` as a Triton dtype, for a kernel's compile-time argument."""
    return tl.float64 if accumulation_dtype(dtype) is torch.float64 else tl.float32


def cdiv(dividend: int, divisor: int) -> int:
    """Divide two integers and round up."""
    # Triton's own also runs in kernels, and takes 5 to 10 us of the host for that.
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, which must be positive."""
    return 1 << (number - 1).bit_length()


# Tensor, or Tensor | None: a function of MaybeTensor returns None only for None, and a type checker knows it.
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def make_rows_contiguous(tensor: MaybeTensor) -> MaybeTensor:
    """Make the elements of the last dimension adjacent in memory: the tensor itself if they are, else a copy.

    Kernels take the strides of the other dimensions, and assume 1 for the last. None stays None.
    """
    # A last dimension of one element may have any stride: nothing is ever multiplied by it.
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


def make_contiguous(tensor: MaybeTensor) -> MaybeTensor:
    """Make a tensor contiguous: the tensor itself if it is, else a contiguous copy; None stays None."""
    return None if tensor is None else tensor.contiguous()


# A plain tuple of a TensorLayout's fields: it compares and hashes the same, and takes half the time to make.
PlainLayout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]


def get_layout_tuple(tensor: Tensor) -> PlainLayout:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


class TensorLayout(NamedTuple):
    """Layout of a tensor: dtype, shape, strides and device, without its address and values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device


def get_layout(tensor: Tensor) -> TensorLayout:
    return TensorLayout._make(get_layout_tuple(tensor))


# Triton versions that were tested: their compiled kernels take all arguments in order, compile-time ones included.
_TESTED_TRITON_VERSIONS = ((3, 6), (3, 9))


@functools.cache
def _can_reuse_compiled() -> bool:
    """True if compiled kernels of this Triton version may be called directly, without Triton's own lookup."""
    version = tuple(int(part) for part in getattr(triton, "__version__", "0.0").split(".")[:2])
    return _TESTED_TRITON_VERSIONS[0] <= version <= _TESTED_TRITON_VERSIONS[1]


class Prepared:
    """A kernel launch that is fixed except for its tensors: call it with the tensors in order, None for a missing one.

    Every call must have the same dtypes and the same missing tensors. Triton also compiles different kernels for each
    device, and for addresses that are multiples of 16 or not. Each call checks only these two and then calls the
    compiled kernel. Triton itself would check everything at each launch, which takes longer.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[int, ...], constants: dict[str, Any]
    ) -> None:
        """Store a Triton kernel, its grid, and its arguments after the tensors.

        `numbers` are whole numbers in the order of the kernel's arguments, and `constants` compile-time arguments by
        name.
        """
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        # The key is the device and each address modulo 16; the value, the compiled kernel and the arguments after the
        # tensors.
        self._compiled: dict[tuple[int | None, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch the stored Triton kernel on the device of the first tensor; Triton would use the current device."""
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


# Prepared launches and their numbers of tensor arguments. The key is the kernel, the grid, the compile-time arguments,
# the tensors' dtypes and the whole numbers. Bounded, because each new shape adds an entry.
_LAUNCHES: dict[tuple[Any, ...], tuple[Prepared, int]] = {}
_MAX_CACHED_LAUNCHES = 8192


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a kernel as `kernel[grid](*args, **constants)` does, but reuse the compiled kernel of an earlier call.

    The earlier call must have had the same key: kernel, grid, compile-time arguments, dtypes and whole numbers. `args`
    are the other arguments in order: a tensor, then tensors or None, then whole numbers such as sizes and strides.
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
    """Call `function.apply(*args)` without its check of each argument for functorch transforms; none may be active."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def is_eager_without_transforms() -> bool:
    """True if `apply_plainly` may be called: nothing is being compiled, and no functorch transform is active."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


class Op:
    """An op of torch.library with a fast path: calls go to the function directly if nothing could see the difference.

    Dispatch in torch.library takes more host time than a kernel launch. It is still used if something must see the op:
    tracing, fake tensors, dispatch modes (the guard's probe, or a checkpoint's policy), functorch transforms, devices
    other than CPU and CUDA, and a profiler, which shows the op's name.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.function = function
        """The implementation; its arguments are tensors, lists of tensors, and plain values."""
        self.library: Any = torch.library.custom_op(
            f"dit_lora::{name}", function, mutates_args=(), device_types=("cpu", "cuda")
        )
        self._node: Any = None

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function that makes the op's outputs for fake tensors, as in torch.library."""
        return self.library.register_fake(fake)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Register the op's backward for both paths, in torch.library and past it, with torch.library's arguments."""
        self.library.register_autograd(backward, setup_context=setup_context)
        function = self.function

        class Node(torch.autograd.Function):
            """Autograd function of an op on the fast path, where torch.library is bypassed."""

            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                output = function(*args)
                setup_context(ctx, args, output)
                return output

        Node.backward = staticmethod(backward)  # type: ignore[assignment]
        self._node = Node

    def __call__(self, *args: Any) -> Any:
        """Compute an op's outputs.

        The call goes through torch.library if something must see the op, else to the function.
        """
        if torch.compiler.is_compiling() or _must_go_through_op(args):
            return self.library(*args)
        if not (torch.is_grad_enabled() and _requires_grad(args)):
            return self.function(*args)
        # For an op without a backward, torch.library raises the error.
        return self.library(*args) if self._node is None else apply_plainly(self._node, *args)


def op(name: str) -> Callable[[Callable[..., Any]], Op]:
    """Make a decorator that turns a function into the op `dit_lora::name`, an `Op` for CPU and CUDA.

    The function must return new tensors, and must not change its arguments.
    """
    return functools.partial(Op, name)


# Exactly these types: a subclass (fake tensor, DTensor) defines itself what a call of an op does.
_PLAIN_TYPES = (Tensor, nn.Parameter)


def _must_go_through_op(args: tuple[Any, ...]) -> bool:
    """True if a call with these arguments must go through torch.library: it is traced, or an argument is special.

    Special tensors are subclasses (such as fake tensors and DTensor), negated views, and tensors on devices other than
    CPU and CUDA.
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
    """True if something observes each op that is called: a dispatch mode, functorch transform, tracer or profiler."""
    # None of these four has a public name; modes and profile are what `torch.library` itself looks at.
    private = torch._C
    return bool(
        private._len_torch_dispatch_stack()
        or private._are_functorch_transforms_active()
        or private._get_tracing_state() is not None
        or private._autograd._profiler_enabled()
    )


def get_plain_layouts(tensors: Sequence[Tensor | None]) -> tuple[PlainLayout | None, ...] | None:
    """Read each tensor's dtype, shape, strides and device; None if a call with them must go through torch.library.

    `_must_go_through_op` says when it must. A missing tensor's layout is None.
    """
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
    """True if any of these tensors, or of the tensors in these lists, requires a gradient."""
    for arg in args:
        for leaf in arg if type(arg) is list else (arg,):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                return True
    return False


@functools.cache
def get_row_block(channels: int) -> dict[str, int]:
    """Choose the block size and the number of warps for a program that takes a row of `channels` elements at once."""
    # 16 values a thread are two 16-byte loads of bf16.
    block = next_power_of_2(channels)
    return {"BLOCK_D": block, "num_warps": min(max(block // 512, 1), 16)}


@functools.cache
def get_row_block_options(channels: int, dtype: torch.dtype, sums: bool) -> dict[str, int]:
    """Choose block size, warps and pipeline stages for a program that takes rows of `channels` elements.

    With `sums` the program takes several rows and adds them up. The stages are then how many rows are in flight at a
    time.
    """
    block = get_row_block(channels)
    if not sums:
        return block | {"STAGES": 1}
    # 8 values per thread, as three sums are in registers too. Shared memory has at most four rows, and as many again.
    size = 4 * block["BLOCK_D"] * dtype.itemsize
    stages = 3 if size <= 2**15 else 2 if size <= 2**17 else 1
    return block | {"num_warps": min(max(block["BLOCK_D"] // 256, 1), 32), "STAGES": stages}
