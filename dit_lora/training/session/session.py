"""Starts and ends a run: checks versions and launch, sets up autocast and the run's folder, and lets ranks agree."""

import json
import math
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from tqdm import tqdm

from dit_lora.config.load import dump_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.data.storage import wait_for_storage
from dit_lora.environment.progress_bar import hide_progress_bars
from dit_lora.environment.versions import find_launch_problem, probe_environment, require_compatible_versions
from dit_lora.errors import DitLoraError, format_list, make_write_error, print_error
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.files import write_atomically
from dit_lora.guard.fallbacks import enable_cudnn_unless_masked
from dit_lora.numerics.precision import Precision, choose_precision
from dit_lora.terminal import make_printable
from dit_lora.training.session.determinism import use_deterministic_algorithms
from dit_lora.training.session.early_checks import require_no_saved_steps, require_run_folder
from dit_lora.training.session.launch import (
    FsdpSettings,
    find_accelerate_launcher_pid,
    is_single_process_launch,
    pop_fsdp_settings,
    pop_zero_stage,
    require_shardable,
)
from dit_lora.training.session.optional_work import OptionalWorkRunner, to_dit_lora_error
from dit_lora.training.session.phases import PhaseTimer
from dit_lora.training.session.run_lock import RunLock
from dit_lora.training.trackers.trackers import Trackers, find_login_problem, require_trackers

# A training collective that takes this long has lost a rank; NCCL's default is a third of it.
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# One rank may encode, sample or write for any length of time: the others wait in another process group.
_WAITING_TIMEOUT = timedelta(days=7)
_FORWARDED_SIGNAL_S = 1.0
"""Seconds within which a repeated signal is the same one, forwarded by a launcher."""
T = TypeVar("T")
_SUPPORTED_LAUNCHES = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


@dataclass(frozen=True)
class Session:
    """One started run before it has a model: its recipe, Accelerator, folder, log and trackers."""

    recipe: Recipe
    accelerator: Accelerator
    precision: Precision
    launcher: int | None = None
    """Process id of the `accelerate launch` that waits for this process; None without one."""
    sharding: FsdpSettings | None = None
    """How weights are sharded over ranks; None if each rank holds all of them."""
    zero_stage: int | None = None
    """DeepSpeed's ZeRO stage; None if the launch does not use it."""
    phases: PhaseTimer = field(default_factory=PhaseTimer)
    """The timed phases of this process."""
    shown_lines: set[str] = field(default_factory=set)
    """The lines that `say_once` has written in this process, in earlier runs too."""
    closing_lines: list[str] = field(default_factory=list)
    """Lines for the end of the run's closing summary, such as why it ended before its last step."""

    @property
    def dir(self) -> Path:
        return Path(self.recipe.run.dir)

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @cached_property
    def trackers(self) -> Trackers:
        """The trackers of the run, on the main process only; not started yet."""
        return Trackers(self.dir, self.recipe.run.trackers if self.is_main else (), self.say)

    @cached_property
    def optional_work(self) -> OptionalWorkRunner:
        """Runner for validation and samples, whose failure does not end the run."""
        return OptionalWorkRunner(lambda value: gather_from_ranks(self.accelerator, value), self.say)

    @cached_property
    def lock(self) -> RunLock:
        """The lock of the run's folder; `require_free_folder` acquires it on the main process."""
        return RunLock(self.dir, self.say)

    @property
    def data_rank(self) -> int:
        """Index of the share of samples that this process reads: ranks that share tokens read the same samples."""
        return self.accelerator.process_index // self.recipe.train.context_parallel

    @property
    def num_data_ranks(self) -> int:
        return self.accelerator.num_processes // self.recipe.train.context_parallel

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step, over all micro-steps and ranks."""
        train = self.recipe.train
        return train.batch_size * train.accumulate * self.num_data_ranks

    def say(self, line: str) -> None:
        """Write one line for the user, on the main process only."""
        if self.is_main:
            # Above a progress bar, if there is one.
            tqdm.write(make_printable(line), file=sys.stderr)

    def say_once(self, line: str) -> None:
        """Write a line for the user, unless this process has written the same line before, as for the first expert.

        It is wrapped to 80 columns.
        """
        if line not in self.shown_lines:
            self.shown_lines.add(line)
            # Hyphens and long words, such as paths, stay whole: they are copied.
            wrapper = textwrap.TextWrapper(80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            self.say("\n".join(map(wrapper.fill, line.splitlines())))


@contextmanager
def start_run_session(recipe: Recipe, *, after: Session | None = None, last: bool = True) -> Iterator[Session]:
    """Start a run; at the end close its trackers and its process group, even after an error.

    `after` is this process's earlier run. The process group is kept for the next run unless this is the `last`.
    """
    with (
        use_deterministic_algorithms(recipe.train.deterministic),
        wait_for_storage(),
        _open_session(recipe, after, is_last=last) as session,
    ):
        yield session


@contextmanager
def _open_session(recipe: Recipe, previous: Session | None, *, is_last: bool) -> Iterator[Session]:
    session = _create_session(recipe, previous)
    # Until the run has ended without an error.
    failed = True
    try:
        yield session
        failed = False
    except DitLoraError as error:
        if error.collective:
            # Show the error and wait for all ranks before any of them ends: the launcher then stops the others.
            print_error(error)
            wait_for_all_ranks(session.accelerator)
        raise
    finally:
        session.trackers.finish(failed=failed)
        session.lock.release()
        # The waiting group ends with the process group; a later run of this process creates its own.
        _get_waiting_group.cache_clear()
        # Gloo's thread takes the interpreter lock to free the last collective's tensors. Destroying the group waits
        # for that thread while holding the lock: a deadlock, unless the thread has run before.
        if session.accelerator.num_processes > 1:
            time.sleep(0.1)
        if is_last or failed:
            session.accelerator.end_training()
        else:
            # Accelerate keeps references to everything it prepared.
            session.accelerator.free_memory()


def _create_session(recipe: Recipe, previous: Session | None) -> Session:
    """Check package versions and the launcher, choose the precision, create the Accelerator; write nothing yet."""
    launcher = find_accelerate_launcher_pid(os.environ)
    phases = PhaseTimer.from_process(launcher) if previous is None else PhaseTimer()
    hide_progress_bars()
    # Checks that can refuse the run come before the process group: no rank waits for one that has ended.
    require_trackers(recipe.run.trackers)
    # Before Accelerate reads it; an earlier run of this process has already taken it.
    sharding = pop_fsdp_settings(os.environ) if previous is None else previous.sharding
    if sharding is not None:
        require_shardable(recipe, "fsdp2")
    zero = pop_zero_stage(os.environ) if previous is None else previous.zero_stage
    if zero is not None:
        require_shardable(recipe, "zero2", has_idle_parameters=_has_idle_parameters(recipe))
    environment = probe_environment()
    warnings = require_compatible_versions(environment, recipe.run.allow_untested)
    on_gpu = torch.cuda.is_available()
    # The recipe decides, not the launch: one owner of autocast.
    precision = choose_precision(recipe.model.dtype, torch.device("cuda" if on_gpu else "cpu"))
    enable_cudnn_unless_masked(masked=get_family(recipe.model.family).has_attention_mask)
    accelerator = Accelerator(
        cpu=not on_gpu,
        mixed_precision=precision.mixed_precision,
        gradient_accumulation_steps=recipe.train.accumulate,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=_COLLECTIVE_TIMEOUT),
            DistributedDataParallelKwargs(find_unused_parameters=_has_idle_parameters(recipe)),
        ],
    )
    _check_launch(accelerator, sharding)
    _check_launch_settings(recipe, accelerator)
    if on_gpu:
        phases.synchronize = torch.cuda.synchronize
    shown_lines = set() if previous is None else previous.shown_lines
    session = Session(recipe, accelerator, precision, launcher, sharding, zero, phases, shown_lines)
    raise_on_all_ranks(accelerator, find_login_problem(recipe.run.trackers) if session.is_main else None)
    for warning in warnings:
        session.say_once(f"warning: {warning}")
    for note in recipe.validation.notes:
        session.say_once(f"note: {note}")
    session.say_once(_describe_launch(session))
    return session


def _describe_launch(session: Session) -> str:
    """The first line of a run's log: processes, device and dtype."""
    count, device = session.accelerator.num_processes, session.accelerator.device.type
    text = f"{count} process{'es' if count > 1 else ''} on {device}, {str(session.precision.dtype)[6:]}"
    if session.sharding:
        text += ", weights sharded (FSDP2)"
    if session.zero_stage:
        text += f", gradients and optimizer state sharded (ZeRO-{session.zero_stage})"
    if device == "cpu" and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("true", "1"):
        text += ": torch finds no usable GPU; see dit-lora doctor"
    # On GPUs bf16 is what everybody expects.
    if device != "cpu" and session.precision.dtype is torch.float32:
        text += f": {session.precision.reason}"
    return text


def _has_idle_parameters(recipe: Recipe) -> bool:
    """True if a step may leave trained parameters without a gradient, such as a vision encoder's without media."""
    groups = recipe.optim.groups
    return recipe.model.family in CHAT_FAMILIES and bool(groups.connector or groups.backbone)


def require_free_folder(session: Session) -> None:
    """Lock run.dir for this run until it ends; call it before anything in the folder is read. Collective.

    Raises `DitLoraError` if it cannot be written, is not a run's, is in use, or holds steps (unless resuming).
    """
    with raise_errors_on_all_ranks(session.accelerator):
        if session.is_main:
            _lock_folder(session.recipe, session.dir, session.lock)


def _lock_folder(recipe: Recipe, folder: Path, lock: RunLock) -> None:
    require_run_folder(folder)
    # Before the folder's files are read: another process may still be writing them.
    lock.acquire()
    try:
        require_no_saved_steps(recipe, folder)
    except DitLoraError:
        lock.release()
        raise


def open_run_folder(session: Session) -> None:
    """Write config.yaml and environment.json. Call it after every check that can refuse the run."""
    if session.is_main:
        write_atomically(session.dir / "config.yaml", dump_recipe(session.recipe))
        environment = asdict(probe_environment())
        environment["packages"] = environment.pop("versions")
        environment["processes"] = session.accelerator.num_processes
        dtype = str(session.precision.dtype).removeprefix("torch.")
        environment["precision"] = f"{dtype}: {session.precision.reason}"
        write_atomically(session.dir / "environment.json", json.dumps(environment, indent=2, sort_keys=True) + "\n")
    wait_for_all_ranks(session.accelerator)


def make_interrupt_handler() -> Callable[[int, FrameType | None], None]:
    """A handler of SIGINT that raises `KeyboardInterrupt`, but not again for the same signal from a launcher.

    The second one would come while the first is reported, or while Python ends, and show a traceback.
    """
    last_signal = -math.inf

    def handle_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal last_signal
        before, last_signal = last_signal, time.monotonic()
        if last_signal - before >= _FORWARDED_SIGNAL_S:
            raise KeyboardInterrupt

    return handle_signal


@contextmanager
def handle_stop_signals(launcher: int | None = None) -> Iterator[Callable[[], int]]:
    """Turn the first SIGINT or SIGTERM inside the context into a request for a clean stop; the second acts at once.

    Yields a function that returns the requested exit code: 130, 143, or 0. The end of the `launcher` counts as
    SIGTERM: `accelerate launch` ends on that signal and does not forward it. torchrun forwards it, also to ranks that
    a terminal or Slurm has already signalled, so a repeated signal counts only after a second.
    """
    requested, last_signal = {"code": 0}, -math.inf

    def handle_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal last_signal
        before, last_signal = last_signal, time.monotonic()
        if requested["code"]:
            # The launcher has forwarded the same signal.
            if last_signal - before < _FORWARDED_SIGNAL_S:
                return
            # A second request: end at once, without saving.
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        # Exit codes of a shell: 130 for SIGINT, 143 for SIGTERM.
        requested["code"] = 128 + number
        # A plain write: the signal may have interrupted one of Python's own writes.
        os.write(2, b"\nstopping: this step is finished and saved first; press Ctrl-C again to stop at once\n")

    def get_stop_code() -> int:
        # An orphan has another parent: the launcher ended without forwarding its signal.
        if not requested["code"] and launcher is not None and os.getppid() != launcher:
            requested["code"] = 128 + signal.SIGTERM
        return requested["code"]

    previous = {s: signal.signal(s, handle_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield get_stop_code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def raise_on_all_ranks(accelerator: Accelerator, error: DitLoraError | None) -> None:
    """Raise the first rank's error on every rank, if any rank passes one. Ranks wait with a timeout of days."""
    local_error = None if error is None else (str(error), error.exit_code)
    errors_by_rank = gather_from_ranks(accelerator, local_error)
    first_error = next((item for item in errors_by_rank if item is not None), None)
    if first_error is None:
        return
    # The same message on all ranks: the launcher may show any of them.
    agreed = DitLoraError(first_error[0])
    agreed.exit_code, agreed.collective = first_error[1], True
    raise agreed from error


def gather_from_ranks(accelerator: Accelerator, value: Any) -> list[Any]:
    """Gather a picklable value from every rank, in rank order. Ranks wait with a timeout of days. Collective."""
    if accelerator.num_processes == 1:
        return [value]
    # One entry per rank.
    values_by_rank = [None] * accelerator.num_processes
    dist.all_gather_object(values_by_rank, value, group=_get_waiting_group(dist.group.WORLD))
    return values_by_rank


@contextmanager
def raise_errors_on_all_ranks(accelerator: Accelerator) -> Iterator[None]:
    """Context that raises a `DitLoraError` of one rank on every rank. Collective."""
    error = None
    try:
        yield
    except DitLoraError as problem:
        error = problem
    raise_on_all_ranks(accelerator, error)


def run_with_shared_errors(session: Session, work: Callable[[], T] | None) -> T | None:
    """Run `work` on the ranks that pass it. An error on any rank is raised on all. Collective.

    Returns the result, None on ranks without `work`.
    """
    result: T | None = None
    failure: DitLoraError | None = None
    if work is not None:
        try:
            result = work()
        except DitLoraError as error:
            failure = error
        except OSError as error:
            failure = make_write_error(error)
        # Any class: other ranks wait for this one.
        except Exception as error:
            if session.accelerator.num_processes == 1:
                raise
            failure = to_dit_lora_error(error)
    raise_on_all_ranks(session.accelerator, failure)
    return result


def wait_for_all_ranks(accelerator: Accelerator) -> None:
    """Barrier with a timeout of days: for work that only one rank does, or that takes some ranks longer."""
    if accelerator.num_processes > 1:
        dist.barrier(group=_get_waiting_group(dist.group.WORLD))


@cache
def _get_waiting_group(_world: Any) -> Any:
    """A gloo process group for long waits: ranks waiting here do not hit NCCL's timeout."""
    return dist.new_group(backend="gloo", timeout=_WAITING_TIMEOUT)


def _check_launch_settings(recipe: Recipe, accelerator: Accelerator) -> None:
    """Raise `DitLoraError` for launch settings, which Accelerate reads too, that contradict the recipe."""
    contradictions = []
    micro_steps = accelerator.gradient_accumulation_steps
    if micro_steps != recipe.train.accumulate:
        contradictions.append(
            f"gradient accumulation of {micro_steps}, against train.accumulate={recipe.train.accumulate}; "
            "launch without --gradient_accumulation_steps"
        )
    shared, processes = recipe.train.context_parallel, accelerator.num_processes
    if processes % shared:
        contradictions.append(f"{processes} process(es), which train.context_parallel={shared} does not divide")
    requested_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if requested_precision not in ("no", accelerator.mixed_precision):
        contradictions.append(
            f"mixed precision {requested_precision}, against {accelerator.mixed_precision} by model.dtype; "
            "launch with --mixed_precision no"
        )
    if contradictions:
        raise DitLoraError(format_list("the launch contradicts the recipe", contradictions))


def _check_launch(accelerator: Accelerator, sharding: FsdpSettings | None) -> None:
    """Raise `DitLoraError` for unsupported launches, and for one process if several were requested: a slow run."""
    is_one = accelerator.num_processes == 1
    problem = find_launch_problem(
        is_multiple_requested=is_one and is_single_process_launch(os.environ, torch.cuda.device_count()),
        is_fsdp_requested=is_one and sharding is not None,
    )
    if problem:
        raise DitLoraError(problem)
    kind = accelerator.distributed_type
    if kind not in _SUPPORTED_LAUNCHES:
        raise DitLoraError(
            f"{kind.value} is not supported by this version: its saving and clipping are DDP's; launch with "
            "accelerate_configs/ddp.yaml"
        )
