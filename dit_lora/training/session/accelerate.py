"""Starts a run with Accelerate in child processes: the config for this machine, signals, and the exit code."""

import logging
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from dit_lora.config.catalog import find_packaged_files_root, list_accelerate_configs
from dit_lora.errors import DitLoraError


def launch_training(script_arguments: Sequence[str], config_file: Path | None = None) -> int:
    """Run recipes/lora.py with Accelerate, and wait for it.

    Args:
        script_arguments: The recipe file and its overrides.
        config_file: An Accelerate config; None for the packaged one that fits this machine.

    Returns:
        The exit code of the run, which `accelerate launch` itself replaces by 1; 128 + N if signal N ended it.

    Raises:
        DitLoraError: Accelerate refuses the config, or this process is already a rank of a launch.
    """
    # Each rank would start a whole run.
    if "LOCAL_RANK" in os.environ:
        raise DitLoraError("dit-lora train starts all processes itself; run it without a launcher")
    with _forward_signals():
        # Accelerate and torch take seconds to import; Ctrl-C works meanwhile.
        import torch
        from accelerate.commands.launch import launch_command, launch_command_parser
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        # A list of the defaults that it has chosen, such as the number of threads.
        logging.getLogger("accelerate.commands.launch").addFilter(
            lambda record: "had defaults used instead" not in record.getMessage()
        )
        options = choose_launch_options(torch.cuda.device_count(), config_file)
        script = find_packaged_files_root() / "recipes" / "lora.py"
        launch = launch_command_parser().parse_args([*options, str(script), *script_arguments])
        # torchrun's own handlers kill the ranks 30 s after a signal, which a large checkpoint may need for saving.
        launch.signals_to_handle = "SIGHUP,SIGQUIT"
        try:
            launch_command(launch)
        except subprocess.CalledProcessError as error:
            return _convert_exit_code(error.returncode)
        except ChildFailedError as error:
            return _convert_exit_code(error.get_first_failure()[1].exitcode)
        except (KeyError, TypeError, ValueError) as error:
            raise DitLoraError(f"Accelerate cannot launch with {launch.config_file}: {error}") from error
    return 0


def choose_launch_options(num_gpus: int, config_file: Path | None = None) -> list[str]:
    """Options for `accelerate launch`: the given config, or the packaged one for a number of GPUs."""
    if config_file is not None:
        return ["--config_file", str(config_file)]
    name = {0: "cpu", 1: "one_gpu"}.get(num_gpus, "ddp")
    options = ["--config_file", str(list_accelerate_configs()[name])]
    return options if num_gpus < 2 else [*options, "--num_processes", str(num_gpus)]


@contextmanager
def _forward_signals() -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the children, which save and end; without children, end at once."""

    def handle_signal(number: int, _frame: FrameType | None) -> None:
        children = psutil.Process().children()
        if not children and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not children:
            raise SystemExit(128 + number)
        for child in children:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                # A second Ctrl-C would end the child without saving.
                if number != signal.SIGINT or not _is_signalled_by_terminal(child.pid):
                    child.send_signal(number)

    previous = {number: signal.signal(number, handle_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_signalled_by_terminal(child: int) -> bool:
    """True if Ctrl-C in this process's terminal reaches the child, too.

    The terminal signals its whole foreground group. torchrun starts ranks in groups of their own.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp() == os.getpgid(child)
    finally:
        os.close(terminal)


def _convert_exit_code(code: int) -> int:
    """Convert a child's exit code, which is negative if a signal ended it, to that of a shell."""
    if code >= 0:
        return code
    if code == -signal.SIGINT:
        # Ctrl-C before the run could handle it.
        raise KeyboardInterrupt
    if code == -signal.SIGKILL:
        raise DitLoraError("the run was killed (SIGKILL); the system may have run out of memory: see dmesg")
    return 128 - code
