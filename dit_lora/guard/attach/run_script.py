"""The guard around a script that knows nothing of it: `dit-lora guard SCRIPT.py ARGS`.

Optimizers, schedules and loaders are noted as they are made. The first call of a model that one of the optimizers
trains begins the guard, with Accelerate where the loop uses it, before anything has been trained.
"""

import gc
import runpy
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from dit_lora.config.ladder import LadderConfig, LoopConfig
from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.dataloaders import Loaders
from dit_lora.guard.attach.guard import Guard
from dit_lora.guard.attach.outermost_calls import leave, listen
from dit_lora.guard.attach.sample_ids import Names
from dit_lora.numerics.ranks import process_index
from dit_lora.patching import Patches
from dit_lora.terminal import echo

Say = Callable[[str], None]


def run_script(
    script: str,
    arguments: Sequence[str],
    *,
    config: LadderConfig,
    folder: Path,
    module: bool = False,
) -> list[Guard]:
    """Run a script, or with `module` a module by its name, as `python` does, and guard all that it trains.

    Returns the guards. Raises what the script raises; `NonFiniteError` where the guard stops it.
    """
    config = LoopConfig.of(config)
    overseer = Overseer(config, folder, _say)
    name = ["-m", script] if module else [script]
    options = [f"--folder={folder}", f"--max-skips={config.max_skips}"]
    options += [f"--snapshot-every={config.snapshot_every}", f"--bundles={config.bundles}"]
    options += ["--preflight"] if config.preflight else []
    options += [f"--monitor-every={config.monitor_every}"]
    if config.spike_threshold is not None:
        options += [f"--spike-threshold={config.spike_threshold}"]
    again = OwnCommand(script, module, ["-m", "dit_lora.guard", *options, *name])
    with overseer.overseeing(), again.guarded():
        run_as_main(script, arguments, module=module)
        overseer.end()
    return overseer.guards


def run_as_main(script: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Run a script, or with `module` a module by its name, as `python` does. Raises what it raises."""
    if not module and not Path(script).is_file():
        raise DitLoraError(f"no such script: {script}")
    argv, path = sys.argv[:], sys.path[:]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path.cwd() if module else Path(script).resolve().parent)
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv[:], sys.path[:] = argv, path


class OwnCommand:
    """Keeps the guard in processes that a script starts of itself, as Lightning does for its ranks.

    A rank without the guard would never answer those that have it.
    """

    def __init__(self, script: str, module: bool, guarded: Sequence[str]) -> None:
        self._script = script
        self._module = module
        self._guarded = list(guarded)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        patches = Patches()
        patches.method(subprocess.Popen, "__init__", self._started)
        try:
            yield
        finally:
            patches.undo()

    def _started(
        self, original: Callable[..., None], process: Any, args: Any, *rest: Any, **kwargs: Any
    ) -> None:
        original(process, self._with_guard(args), *rest, **kwargs)

    def _with_guard(self, command: Any) -> Any:
        if not isinstance(command, (list, tuple)) or list(command[:1]) != [sys.executable]:
            return command
        words = list(map(str, command[1:]))
        if self._module and words[:2] == ["-m", self._script]:
            return [sys.executable, *self._guarded, *words[2:]]
        if not self._module and words and Path(words[0]).resolve() == Path(self._script).resolve():
            return [sys.executable, *self._guarded, *words[1:]]
        return command


class Overseer:
    """Notes what a loop is made of, and guards it from the first call of a model that is trained."""

    def __init__(self, config: LoopConfig, folder: Path, say: Say) -> None:
        self.guards: list[Guard] = []
        self._config = config
        self._folder = folder
        self._say = say
        self._names = Names()
        self._patches = Patches()
        self._loaders = Loaders(self._names, self._patches)
        self._waiting: list[weakref.ref[torch.optim.Optimizer]] = []
        """Optimizers that are not guarded yet."""
        self._schedules: list[weakref.ref[LRScheduler]] = []
        self._scalers: list[weakref.ref[Any]] = []
        self._stepped_by: set[type] = set()
        """Classes of optimizers whose `step` is watched for a first step."""

    @contextmanager
    def overseeing(self) -> Iterator[None]:
        """Note what is made within."""
        self._patches.method(torch.optim.Optimizer, "__init__", self._optimizer)
        self._patches.method(LRScheduler, "__init__", self._schedule)
        self._patches.method(torch.amp.GradScaler, "__init__", self._scaler)
        self._loaders.follow_all(DataLoader)
        for module in (nn.utils, nn.utils.clip_grad):  # the same function, by two ways
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                self._patches.method(module, name, self._clip)
        self._patches.method(torch, "save", self._save)
        # Before anybody imports the function by its name.
        if find_spec("safetensors") is not None:
            self._patches.method(import_module("safetensors.torch"), "save_file", self._save)
        try:
            yield
        finally:
            leave(self._around)
            for guard in self.guards:
                guard.detach()
            self._patches.undo()

    def end(self) -> None:
        """Look once more at what was trained, and say what was not guarded."""
        for guard in self.guards:
            guard.require_finite()
        for optimizer in filter(None, (one() for one in self._waiting)):
            self._say(f"not guarded: {_named(optimizer)}, for no model that it trains was called")
        if not self._stepped_by:
            self._say("nothing was guarded: the script made no torch.optim.Optimizer")

    def _optimizer(
        self, original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        self._waiting.append(weakref.ref(optimizer))
        self._loaders.follow_accelerate()  # by now it is imported, if the loop uses it
        kind = type(optimizer)
        if kind not in self._stepped_by:
            self._stepped_by.add(kind)
            self._patches.method(kind, "step", self._step)
        listen(self._around)

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for guard in self.guards:
            guard.before_clipping()
        return original(*args, **kwargs)

    def _step(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin to guard at the first step at the latest: its closure may be the first to call a model."""
        waiting = [one for one in (ref() for ref in self._waiting) if one is not None]
        if not any(one is optimizer for one in waiting):
            return original(optimizer, *args, **kwargs)
        self._begin(waiting)
        return optimizer.step(*args, **kwargs)

    def _schedule(
        self, original: Callable[..., None], schedule: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(schedule, *args, **kwargs)
        self._schedules.append(weakref.ref(schedule))

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Look at what the last step left before a checkpoint has it: tensors in it are those that are put back."""
        for guard in self.guards:
            guard.before_save(args or kwargs)
        return original(*args, **kwargs)

    def _scaler(
        self, original: Callable[..., None], scaler: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(scaler, *args, **kwargs)
        self._scalers.append(weakref.ref(scaler))

    @contextmanager
    def _around(self, model: nn.Module) -> Iterator[None]:
        """Begin to guard if the model is one that an optimizer trains."""
        waiting = [one for one in (ref() for ref in self._waiting) if one is not None]
        own = {id(parameter) for parameter in model.parameters()}
        if not any(id(p) in own for one in waiting for p in _held(one)):
            yield
            return
        self._begin(waiting)
        yield

    def _begin(self, waiting: Sequence[torch.optim.Optimizer]) -> None:
        self._waiting.clear()
        leave(self._around)
        self._guard(waiting)

    def _guard(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        accelerator = _accelerator_of(optimizers)
        prepared = [one.scheduler for one in accelerator._schedulers] if accelerator else []
        schedules = [
            one
            for one in (ref() for ref in self._schedules)
            if one is not None and one.optimizer in optimizers and one not in prepared
        ]
        names = ", ".join(map(_named, optimizers))
        try:
            guard = Guard.over(
                accelerator,
                [],
                optimizers,
                lr_scheduler=schedules,
                config=self._config,
                folder=self._folder,
                # Accelerate has its own, which the guard knows.
                scaler=[] if accelerator else [one for one in (r() for r in self._scalers) if one],
                names=self._names,
            )
        except DitLoraError as problem:
            self._say(f"not guarded: {names}: {problem}")
            return
        self.guards.append(guard)
        count = sum(parameter.numel() for one in optimizers for parameter in _held(one))
        loop = "an Accelerate loop" if accelerator is not None else "a plain PyTorch loop"
        self._say(
            f"watching {names} with {count:,} trained numbers in {loop}; events go to {self._folder}"
        )


class _NoAccelerator:
    """Stands for the class where Accelerate is not imported."""


def _held(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _named(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _accelerator_of(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Return the Accelerator that has prepared one of the optimizers, or None.

    It keeps no list of itself, so it is looked for among all objects, once.
    """
    accelerate = sys.modules.get("accelerate")
    kind: type = getattr(accelerate, "Accelerator", _NoAccelerator)
    for candidate in gc.get_objects() if accelerate is not None else ():
        # By its type: proxies among the objects act when they are asked what they are.
        if issubclass(type(candidate), kind):
            wrapped = [wrapper.optimizer for wrapper in candidate._optimizers]
            if any(one is other for one in wrapped for other in optimizers):
                return candidate
    return None


def _say(words: str) -> None:
    if process_index() == 0:
        echo(f"guard: {words}", err=True)
