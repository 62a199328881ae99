"""Guard a script that does not use the guard itself: `dit-lora guard SCRIPT.py ARGS`.

Optimizers and schedules are recorded as they are created, and every DataLoader is followed. The first call of a model
that one of the optimizers trains starts the guard, with Accelerate if the loop uses it, before anything is trained.
"""

import builtins
import gc
import io
import runpy
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dit_lora.config.recovery_settings import LoopConfig, RecoveryConfig
from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.calls.call_log import CallLog
from dit_lora.guard.attach.calls.discover_models import ModelDiscovery
from dit_lora.guard.attach.calls.outermost_calls import OutermostCall, add_listener, remove_listener
from dit_lora.guard.attach.containment import try_or_warn
from dit_lora.guard.attach.guard import Guard
from dit_lora.guard.attach.interception import MethodInterceptions
from dit_lora.guard.attach.loop_events import EVENTS
from dit_lora.guard.finite_gate import NonFiniteError
from dit_lora.numerics.ranks import get_process_index
from dit_lora.terminal import echo

LogFunction = Callable[[str], None]


def run_script(
    script: str, arguments: Sequence[str], *, config: RecoveryConfig, folder: Path, module: bool = False
) -> list[Guard]:
    """Run a script, or with `module` a module by its name, as `python` does, and guard everything it trains.

    Returns the guards that are still alive.

    Raises:
        NonFiniteError: If the recovery actions of `config` include `stop` and the guard ends the script.
        Exception: Any exception of the script.
    """
    config = LoopConfig.from_recovery_config(config)
    script_guard = ScriptGuard(config, folder, _log_to_stderr)
    name = ["-m", script] if module else [script]
    # The options for a child process, which guards itself in the same way.
    options = [f"--folder={folder}"]
    options += [f"--max-skips={config.max_skips}"] if "stop" in config.on_nonfinite else []
    options += [f"--snapshot-every={config.snapshot_every}", f"--bundles={config.bundles}"]
    options += ["--preflight"] if config.preflight else []
    options += [f"--monitor-every={config.monitor_every}"]
    if config.spike_threshold is not None:
        options += [f"--spike-threshold={config.spike_threshold}"]
    options += ["--gradient-check"] if config.gradient_every else []
    command = SubprocessGuard(script, module, ["-m", "dit_lora.guard", *options, *name])
    with script_guard.watch_script(), command.guard_subprocesses():
        run_as_main(script, arguments, module=module)
        script_guard.check_state_at_script_end()
    return script_guard.active_guards


def run_as_main(script: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Run a script, or with `module` a module by its name, as `python` does. Raises what the script raises.

    The script's module stays `__main__` until its threads have ended, since they may pickle objects of its classes.
    """
    if not module and not Path(script).exists():
        raise DitLoraError(f"the script {script} does not exist")
    if not module and Path(script).is_dir() and not (Path(script) / "__main__.py").is_file():
        raise DitLoraError(f"{script} is a folder without __main__.py; give a Python script")
    argv, path, main = sys.argv[:], sys.path[:], sys.modules["__main__"]
    earlier_threads = threading.enumerate()
    sys.argv = [script, *arguments]
    # As `python` does: the script's folder, or the current one for a module.
    sys.path[0] = str(Path.cwd() if module else Path(script).resolve().parent)
    try:
        if not module and Path(script).is_dir():
            runpy.run_path(script, run_name="__main__")
            return
        code, scope = _load_code(script, module=module)
        sys.argv[0] = scope.__file__ or script
        sys.modules["__main__"] = scope
        # runpy would restore `__main__` at once, while threads of the script may still need it.
        exec(code, vars(scope))
        # As `python` does at exit, wait for the non-daemon threads that the script started.
        for thread in threading.enumerate():
            if thread not in earlier_threads and not thread.daemon:
                thread.join()
    finally:
        sys.modules["__main__"] = main
        sys.argv[:], sys.path[:] = argv, path


def _load_code(script: str, *, module: bool) -> tuple[CodeType, ModuleType]:
    """Load the code of a script, or with `module` of a module by its name, and a `__main__` module to run it in."""
    scope = ModuleType("__main__")
    if not module:
        vars(scope).update(__file__=script, __builtins__=builtins, __spec__=None, __package__=None)
        with io.open_code(str(Path(script).resolve())) as file:
            try:
                return compile(file.read(), script, "exec"), scope
            except (SyntaxError, ValueError) as error:  # ValueError: null bytes, in some versions of Python
                raise DitLoraError(f"{script} is not valid Python: {error}") from error
    try:
        spec = find_spec(script)
    except ModuleNotFoundError as error:
        # A package that contains the module is missing. Anything else is an error of that package.
        if not f"{script}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is not None and spec.submodule_search_locations is not None:
        # `python -m package` runs the package's `__main__` module.
        spec = find_spec(f"{script}.__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and spec.loader else None  # type: ignore[attr-defined]
    if spec is None or code is None:
        raise DitLoraError(f"no module named {script} can be run")
    vars(scope).update(
        __file__=spec.origin, __builtins__=builtins, __spec__=spec, __package__=spec.parent, __loader__=spec.loader
    )
    return code, scope


class SubprocessGuard:
    """Keeps the guard in processes in which a script starts itself again, as Lightning does for its ranks.

    A rank without the guard would never join the collectives of the guarded ranks.
    """

    def __init__(self, script: str, module: bool, guarded_command: Sequence[str]) -> None:
        self._script = script
        self._module = module
        self._guarded_command = list(guarded_command)

    @contextmanager
    def guard_subprocesses(self) -> Iterator[None]:
        interceptions = MethodInterceptions()
        interceptions.intercept_function(subprocess.Popen, "__init__", self._intercept_popen)
        try:
            yield
        finally:
            interceptions.restore_originals()

    def _intercept_popen(
        self, original: Callable[..., None], process: Any, args: Any, *popen_args: Any, **kwargs: Any
    ) -> None:
        original(process, self._add_guard_to_command(args), *popen_args, **kwargs)

    def _add_guard_to_command(self, command: Any) -> Any:
        # Only a command that starts with this interpreter is taken for the script itself.
        if not isinstance(command, (list, tuple)) or list(command[:1]) != [sys.executable]:
            return command
        arguments = list(map(str, command[1:]))
        if self._module and arguments[:2] == ["-m", self._script]:
            return [sys.executable, *self._guarded_command, *arguments[2:]]
        if not self._module and arguments and Path(arguments[0]).resolve() == Path(self._script).resolve():
            return [sys.executable, *self._guarded_command, *arguments[1:]]
        return command


class _FirstStepHook:
    """Replacement for the step of an optimizer that has no guard yet.

    It starts guarding before the step, because the step's closure may be the first to call a model.
    """

    def __init__(self, script_guard: "ScriptGuard", optimizer: torch.optim.Optimizer) -> None:
        self._script_guard = script_guard
        self._optimizer = weakref.ref(optimizer)

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = self._optimizer()
        if optimizer is None or not self._script_guard.start_if_unguarded(optimizer):
            return original(*args, **kwargs)
        # Look up the method again: it is the guard's replacement now.
        return optimizer.step(*args, **kwargs)


class ScriptGuard:
    """Guards a script's training loop: records its optimizers, and starts at the first call of a trained model."""

    def __init__(self, config: LoopConfig, folder: Path, log: LogFunction) -> None:
        self._config = config
        self._folder = folder
        self._log = log
        self._guards: list[weakref.ref[Guard]] = []
        self._interceptions = MethodInterceptions()
        self._first_steps = MethodInterceptions()
        self._unguarded: list[tuple[weakref.ref[torch.optim.Optimizer], _FirstStepHook]] = []
        """Optimizers that are not guarded yet."""
        self._discovery: ModelDiscovery | None = None
        """Records model calls before the guard exists; the first backward shows which models are trained."""
        self._schedules: list[weakref.ref[LRScheduler]] = []
        self._num_optimizers = 0

    @property
    def active_guards(self) -> list[Guard]:
        """Guards in this script that are still alive. A guard ends with its optimizers."""
        return [guard for ref in self._guards if (guard := ref()) is not None]

    @contextmanager
    def watch_script(self) -> Iterator[None]:
        """Record the optimizers and schedules that a script creates inside the context."""
        self._interceptions.intercept_function(torch.optim.Optimizer, "__init__", self._intercept_optimizer_init)
        self._interceptions.intercept_function(LRScheduler, "__init__", self._intercept_schedule_init)
        EVENTS.after_backward.append(self._start_if_gradients)
        try:
            with EVENTS.intercept_loop_functions():
                yield
        finally:
            EVENTS.after_backward.remove(self._start_if_gradients)
            remove_listener(self._start_guard_before_call)
            if self._discovery is not None:
                self._discovery.stop_recording_calls()
                self._discovery = None
            for guard in self.active_guards:
                try_or_warn(guard.detach, "ending the guard")
            self._first_steps.restore_originals()
            self._interceptions.restore_originals()

    def check_state_at_script_end(self) -> None:
        """Check the trained state at the end of a script, and report optimizers that were not guarded."""
        for guard in self.active_guards:
            guard.check_state()
        for optimizer in self._list_unguarded():
            self._log(f"not guarded: {type(optimizer).__name__}, because no model that it trains was called")
        if not self._num_optimizers:
            self._log("nothing was guarded: the script created no torch.optim.Optimizer")

    def start_if_unguarded(self, optimizer: torch.optim.Optimizer) -> bool:
        """Start guarding an optimizer at its first step at the latest. True if it was not guarded before."""
        if not any(ref() is optimizer for ref, _ in self._unguarded):
            return False
        self._start_guard()
        return True

    def _intercept_optimizer_init(
        self, original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        try_or_warn(lambda: self._record_optimizer(optimizer), "noting an optimizer")

    def _record_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if any(ref() is optimizer for ref, _ in self._unguarded):  # its constructor ran twice
            return
        self._num_optimizers += 1
        EVENTS.follow_accelerate_loaders()  # by now it is imported, if the loop uses it
        first_step = _FirstStepHook(self, optimizer)
        self._unguarded.append((weakref.ref(optimizer), first_step))
        # A loop that calls its model only in a closure is first seen in the optimizer's step.
        self._first_steps.intercept_method(optimizer, "step", first_step.step)
        if self._discovery is None:
            self._discovery = ModelDiscovery(CallLog(EVENTS.batches), dict)
            self._discovery.start_recording_calls()
        add_listener(self._start_guard_before_call)

    def _intercept_schedule_init(
        self, original: Callable[..., None], schedule: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(schedule, *args, **kwargs)
        try_or_warn(lambda: self._record_schedule(schedule), "noting a schedule")

    def _record_schedule(self, schedule: LRScheduler) -> None:
        self._schedules.append(weakref.ref(schedule))
        for guard in self.active_guards:
            if guard.is_watching(schedule.optimizer):
                guard.add_schedule(schedule)

    @contextmanager
    def _start_guard_before_call(self, call: OutermostCall) -> Iterator[None]:
        """Start guarding if the called module has parameters that an optimizer trains."""
        try_or_warn(lambda: self._start_if_trained(call.module), "beginning the guard")
        yield

    def _start_if_trained(self, module: nn.Module) -> None:
        module_ids = {id(parameter) for parameter in module.parameters()}
        if any(id(p) in module_ids for optimizer in self._list_unguarded() for p in _list_parameters(optimizer)):
            self._start_guard()

    def _start_if_gradients(self) -> None:
        """Start guarding after the first backward: weights may be used by models that do not own them."""
        if any(p.grad is not None for optimizer in self._list_unguarded() for p in _list_parameters(optimizer)):
            self._start_guard()

    def _list_unguarded(self) -> list[torch.optim.Optimizer]:
        return [optimizer for ref, _ in self._unguarded if (optimizer := ref()) is not None]

    def _start_guard(self) -> None:
        optimizers = self._list_unguarded()
        self._unguarded.clear()
        remove_listener(self._start_guard_before_call)
        discovery, self._discovery = self._discovery, None
        try_or_warn(
            lambda: self._create_guard(optimizers, discovery), "beginning the guard", reraised=(NonFiniteError,)
        )
        # Undo only now: a loop that holds the bound method `optimizer.step` must reach the guard's replacement.
        self._first_steps.restore_originals()

    def _create_guard(self, optimizers: Sequence[torch.optim.Optimizer], discovery: ModelDiscovery | None) -> None:
        accelerator = _find_accelerator(optimizers)
        # Accelerate's own schedules are followed through the accelerator.
        prepared = [wrapper.scheduler for wrapper in accelerator._schedulers] if accelerator else []
        live = [schedule for ref in self._schedules if (schedule := ref()) is not None]
        schedules = [schedule for schedule in live if schedule.optimizer in optimizers and schedule not in prepared]
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        try:
            guard = Guard.create(
                accelerator,
                [],
                optimizers,
                lr_scheduler=schedules,
                config=self._config,
                folder=self._folder,
                discovery=discovery,
            )
        except DitLoraError as problem:
            self._log(f"not guarded: {names}: {problem}")
            return
        self._guards.append(weakref.ref(guard))
        count = sum(parameter.numel() for wrapper in optimizers for parameter in _list_parameters(wrapper))
        loop_kind = "an Accelerate loop" if accelerator is not None else "a plain PyTorch loop"
        self._log(f"watching {names} with {count:,} trained numbers in {loop_kind}; events go to {self._folder}")


def _list_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _find_accelerator(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """The Accelerator that has prepared one of the optimizers, or None.

    Accelerate keeps no list of its instances, so this searches all live objects, once.
    """
    kind: type | None = getattr(sys.modules.get("accelerate"), "Accelerator", None)
    if kind is None:
        return None
    for candidate in gc.get_objects():
        # Check the type, not isinstance: proxy objects may run code when asked for their class.
        if issubclass(type(candidate), kind):
            # A script may have several accelerators.
            wrapped = {id(wrapper.optimizer) for wrapper in candidate._optimizers}
            if any(id(optimizer) in wrapped for optimizer in optimizers):
                return candidate
    return None


def _log_to_stderr(message: str) -> None:
    if get_process_index() == 0:
        echo(f"guard: {message}", err=True)
