"""Report the events of a process's training loops: backward passes, clipping, scaler steps, saves and batches.

These events go through functions of torch, which are intercepted once for all guards of a process, while any lives.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from typing import Any, Protocol

import torch

from dit_lora.guard.attach.containment import try_or_warn
from dit_lora.guard.attach.interception import MethodInterceptions
from dit_lora.guard.attach.samples.dataloaders import DataLoaderBatchRecorder
from dit_lora.guard.attach.samples.loaded_batches import LoadedBatches
from dit_lora.guard.attach.samples.opened_files import record_path
from dit_lora.guard.finite_gate import NonFiniteError


class LoopListener(Protocol):
    """Interface of a guard that is notified of a loop's backward passes, clipping, scaler steps and saves."""

    def before_backward(self, tensors: Any) -> None: ...

    def on_backward_error(self, error: RuntimeError) -> None: ...

    def before_gradient_norm(self) -> None: ...

    def on_bad_norm(self, *, raises: bool) -> None: ...

    def take_scaler_step(
        self, scaler: Any, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Handle a gradient scaler's step of an optimizer; NotImplemented if the optimizer is another guard's."""

    def before_save(self, value: Any, path: str) -> None: ...

    def after_weights_loaded(self, module: torch.nn.Module) -> None: ...


class LoopEventDispatcher:
    """Intercepts the functions that training loops call, and forwards their events to the guards of this process."""

    def __init__(self) -> None:
        self.batches = LoadedBatches()
        """Batches that the process's DataLoaders have handed out."""
        self._loaders = DataLoaderBatchRecorder(self.batches)
        self._listeners: list[weakref.ref[Any]] = []
        self._num_users = 0
        self._interceptions: MethodInterceptions | None = None
        self._is_saving = False
        self.after_backward: list[Callable[[], None]] = []
        """Called after each backward of the loop."""

    def register_loop_listener(self, listener: LoopListener) -> None:
        """Register a guard, which is notified of every event of the training loop from now on."""
        # When the loop drops its guard, stop intercepting.
        self._listeners.append(weakref.ref(listener, lambda _ref: self._uninstall_if_unused()))
        self._patch_loop_functions()

    def unregister_loop_listener(self, listener: LoopListener) -> None:
        self._listeners[:] = [ref for ref in self._listeners if ref() not in (None, listener)]
        self._uninstall_if_unused()

    @contextmanager
    def intercept_loop_functions(self) -> Iterator[None]:
        """Intercept the functions that a training loop calls inside the context, even before a guard exists."""
        self.install_interceptions()
        try:
            yield
        finally:
            self.release_interceptions()

    def install_interceptions(self) -> None:
        self._num_users += 1
        self._patch_loop_functions()

    def release_interceptions(self) -> None:
        self._num_users -= 1
        self._uninstall_if_unused()

    def follow_accelerate_loaders(self) -> None:
        """Start following Accelerate's data loaders too, if the loop has imported Accelerate since."""
        if self._interceptions is not None:
            self._loaders.follow_accelerate_loaders(self._interceptions)

    def _patch_loop_functions(self) -> None:
        if self._interceptions is not None:
            return
        interceptions = self._interceptions = MethodInterceptions()
        # `Tensor.backward` calls this function too.
        interceptions.intercept_function(torch.autograd, "backward", self._intercept_backward)
        clip = import_module("torch.nn.utils.clip_grad")
        # Intercept a function inside clip_grad_norm_: scripts have often imported clip_grad_norm_ itself by name.
        if hasattr(clip, "_get_total_norm"):
            interceptions.intercept_function(clip, "_get_total_norm", self._intercept_gradient_norm)
        interceptions.intercept_function(torch.amp.GradScaler, "step", self._intercept_scaler_step)
        interceptions.intercept_function(torch, "save", self._intercept_torch_save)
        script = import_module("torch.jit._script")
        for name in ("save", "save_to_buffer"):  # what torch.jit.save goes through
            for kind in (script.ScriptModule, script.RecursiveScriptModule):
                interceptions.intercept_function(kind, name, self._intercept_script_save)
        interceptions.intercept_function(torch.nn.Module, "load_state_dict", self._intercept_load_state_dict)
        if find_spec("safetensors") is not None:
            module = import_module("safetensors.torch")
            interceptions.intercept_function(module, "save_file", self._intercept_safetensors_save)
            interceptions.intercept_function(module, "safe_open", self._intercept_safetensors_open)
            # Both save functions go through this one, which also covers scripts that have imported them by name.
            if hasattr(module, "_flatten_as_ptr"):
                interceptions.intercept_function(module, "_flatten_as_ptr", self._intercept_safetensors_flatten)
        # A script that has not imported NumPy saves nothing with it, so do not import it here.
        numpy = sys.modules.get("numpy")
        for name in ("save", "savez", "savez_compressed") if numpy is not None else ():
            interceptions.intercept_function(numpy, name, self._intercept_numpy_save)  # type: ignore[arg-type]
        self._loaders.patch_dataloaders(interceptions)

    def _uninstall_if_unused(self) -> None:
        if self._interceptions is not None and not self._num_users and not self._list_listeners():
            self._interceptions.restore_originals()
            self._interceptions = None
            self.batches.clear_batches()

    def _list_listeners(self) -> list[Any]:
        live = [listener for ref in self._listeners if (listener := ref()) is not None]
        if len(live) < len(self._listeners):
            self._listeners[:] = [ref for ref in self._listeners if ref() is not None]
        return live

    def _notify_listeners(self, notify: Callable[[Any], Any], activity: str) -> None:
        for listener in self._list_listeners():
            try_or_warn(lambda: notify(listener), activity, reraised=(NonFiniteError,))  # noqa: B023

    def _intercept_backward(self, original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        # A checkpointed block runs a nested backward inside the loop's.
        if torch._C._current_graph_task_id() != -1:
            original(tensors, *args, **kwargs)
            return
        for reference in tuple(self._listeners):
            if (listener := reference()) is not None:
                listener.before_backward(tensors)
        try:
            original(tensors, *args, **kwargs)
        except RuntimeError as error:
            # Only anomaly mode raises for NaN; other errors of a backward are the loop's own.
            if torch.is_anomaly_enabled():
                backward_error = error
                self._notify_listeners(
                    lambda listener: listener.on_backward_error(backward_error), "a failed backward"
                )
            raise
        if self.after_backward:
            for act in list(self.after_backward):
                try_or_warn(act, "after a backward")

    def _intercept_gradient_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for listener in self._list_listeners():
            listener.before_gradient_norm()
        try:
            norm = original(*args, **kwargs)
        except RuntimeError:  # error_if_nonfinite
            self._notify_listeners(lambda listener: listener.on_bad_norm(raises=True), "a bad gradient norm")
            raise
        # If the norm is finite, so is every gradient.
        if isinstance(norm, torch.Tensor) and not isfinite(norm.item()):
            self._notify_listeners(lambda listener: listener.on_bad_norm(raises=False), "a bad gradient norm")
        return norm

    def _intercept_scaler_step(
        self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        for listener in self._list_listeners():
            result = listener.take_scaler_step(scaler, original, optimizer, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return original(scaler, optimizer, *args, **kwargs)

    def _intercept_load_state_dict(
        self, original: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(module, *args, **kwargs)
        self._notify_listeners(lambda listener: listener.after_weights_loaded(module), "following loaded weights")
        return result

    def _intercept_torch_save(self, original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_saved_values(obj, f)
        return original(obj, f, *args, **kwargs)

    def _intercept_script_save(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_saved_values(module, args[0] if args else kwargs.get("f", ""))
        return original(module, *args, **kwargs)

    def _intercept_safetensors_open(
        self, original: Callable[..., Any], filename: Any, *args: Any, **kwargs: Any
    ) -> Any:
        record_path(filename)
        return original(filename, *args, **kwargs)

    def _intercept_safetensors_save(
        self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._check_saved_values(tensors, args[0] if args else kwargs.get("filename", ""))
        # `save_file` calls other functions that are intercepted; check the tensors once.
        with self.pause_save_checks():
            return original(tensors, *args, **kwargs)

    def _intercept_safetensors_flatten(
        self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._check_saved_values(tensors, "")
        return original(tensors, *args, **kwargs)

    def _intercept_numpy_save(self, original: Callable[..., Any], file: Any, *arrays: Any, **named: Any) -> Any:
        self._check_saved_values({**dict(enumerate(arrays)), **named}, file)
        return original(file, *arrays, **named)

    def _check_saved_values(self, value: Any, path: object) -> None:
        if self._is_saving:  # the guard has already checked what it writes itself
            return
        # Open files have a path as their name, unless they are buffers in memory.
        target = getattr(path, "name", path) if hasattr(path, "write") else path
        name = str(target) if isinstance(target, (str, os.PathLike)) else ""
        self._notify_listeners(lambda listener: listener.before_save(value, name), "looking at what is saved")

    @contextmanager
    def pause_save_checks(self) -> Iterator[None]:
        """Pause the checks of saved values inside the context."""
        was_saving, self._is_saving = self._is_saving, True
        try:
            yield
        finally:
            self._is_saving = was_saving


EVENTS = LoopEventDispatcher()
