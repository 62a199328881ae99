"""Runs the faults and prints the table.

torchrun --nproc_per_node 2 -m dit_lora.faults.suite OUT.json [PATTERN]      # what `dit-lora faults --ranks 2` does
"""

import fnmatch
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from dit_lora.errors import DitLoraError
from dit_lora.faults import ops, phases, samples, state
from dit_lora.faults.fault import Fault, Judged
from dit_lora.faults.world import World
from dit_lora.files import write_whole


def catalog() -> list[Fault]:
    """Every fault, in the order of the table."""
    return [*samples.cached(), *samples.drawn(), *state.faults(), *ops.faults(), *phases.faults()]


def chosen(pattern: str | None) -> list[Fault]:
    """The faults whose name matches a pattern such as `*latent*`; all without one."""
    faults = [f for f in catalog() if pattern is None or fnmatch.fnmatchcase(f.name, pattern)]
    if not faults:
        names = ", ".join(fault.name for fault in catalog())
        raise DitLoraError(f"no fault is called {pattern!r}; there are: {names}")
    return faults


def judge_all(faults: Sequence[Fault]) -> Iterator[Judged]:
    """Inject one after the other; on every rank alike, each in a run of its own."""
    logging.getLogger("dit_lora").setLevel(logging.ERROR)
    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shared: list[Any] = [folder]
        broadcast_object_list(shared)
        world = World(Path(shared[0]), accelerator)
        world.reference("clean", ())  # encodes the clips that the faults' caches begin with
        for fault in faults:
            yield fault.judge(world)
        accelerator.wait_for_everyone()
    time.sleep(0.1)  # gloo lets go of its tensors (docs/log.md)
    accelerator.end_training()


def main(argv: Sequence[str]) -> None:
    """Judge and write the lines from the main process."""
    out, pattern = Path(argv[0]), argv[1] if len(argv) > 1 else None
    lines = [asdict(one) for one in judge_all(chosen(pattern))]
    if Accelerator().is_main_process:
        write_whole(out, json.dumps(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
