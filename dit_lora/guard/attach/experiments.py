"""Run a loop's models again without side effects: gradients, buffers, counters and random states are restored."""

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dit_lora.numerics.layouts import get_strided_values

_MAX_BUFFER_BYTES = 2**30
_PLAIN_TYPES = (bool, int, float, str, type(None))
_TORCH_ATTRIBUTES = ("_parameters", "_buffers", "_modules")


@contextmanager
def preserve_model_and_rng_state(models: Sequence[nn.Module]) -> Iterator[None]:
    """Restore everything that running models changes, apart from gradients, when the context ends.

    Covers buffers, plain attributes and the contents of lists, dicts and sets of every module, and the states of
    Python's and NumPy's generators. Hooks on accumulated gradients, such as an optimizer in the backward, do not run.
    """
    # A module that several models share is saved once.
    modules = {id(module): module for model in models for module in model.modules()}
    attributes = [_AttributeBackup(module) for module in modules.values()]
    buffers = _BufferBackup(list(modules.values()))
    parameters = {id(p): p for model in models for p in model.parameters()}
    python_state = random.getstate()
    # A script that has not imported NumPy draws no numbers with it, so do not import it here.
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    hooks: list[tuple[Any, Any]] = []
    for parameter in parameters.values():
        if saved_hooks := getattr(parameter, "_post_accumulate_grad_hooks", None):
            hooks.append((parameter, saved_hooks))
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for hooked_parameter, saved_hooks in hooks:
            hooked_parameter._post_accumulate_grad_hooks = saved_hooks
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for saved in attributes:
            saved.restore_module_attributes()
        buffers.restore_buffers()


class _AttributeBackup:
    """Backup of a module's plain attributes and containers, without its tensors and submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values: dict[str, Any] = {}
        self._contents: list[tuple[Any, Any]] = []
        for name, value in vars(module).items():
            # These hold parameters, buffers, submodules and hooks, which are not copied here.
            if name in _TORCH_ATTRIBUTES or name.endswith("_hooks") or "_hooks_" in name:
                continue
            # Immutable values and tensors may be rebound; the old reference restores them.
            if isinstance(value, (*_PLAIN_TYPES, torch.Tensor, tuple)):
                self._values[name] = value
            # Containers may be written to in place, so keep a copy of their contents.
            elif type(value) in (list, dict, set, deque, OrderedDict, defaultdict):
                self._contents.append((value, copy.copy(value)))
        self._names = set(vars(module))

    def restore_module_attributes(self) -> None:
        attributes = vars(self._module)
        attributes.update(self._values)
        # Remove attributes that did not exist before.
        for name in [name for name in attributes if name not in self._names]:
            del attributes[name]
        for container, content in self._contents:
            # Refill the same object, since others may refer to it.
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(content)
            else:
                container.update(content)


class _BufferBackup:
    """Backup of modules' buffers, up to 1 GiB, to undo what a forward pass writes to them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._saved_buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor | None]] = []
        remaining_bytes = _MAX_BUFFER_BYTES
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.device.type == "meta":
                    continue
                stored = get_strided_values(buffer.detach())
                remaining_bytes -= stored.nbytes
                values = stored.clone() if remaining_bytes >= 0 else None
                self._saved_buffers.append((module, name, buffer, values))

    @torch.no_grad()
    def restore_buffers(self) -> None:
        for module, name, buffer, values in self._saved_buffers:
            # A forward may have replaced the buffer by another tensor.
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
            # Batch norm's own writes do not raise the version, so this must not either.
            if values is not None:
                with torch.autograd._unsafe_preserve_version_counter(buffer):
                    get_strided_values(buffer).copy_(values)
