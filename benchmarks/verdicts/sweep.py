"""Runs drawn faults, each in a separate process that is forked from one that has imported and built everything."""

import faulthandler
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accelerate import Accelerator

from benchmarks.faults import arms
from benchmarks.faults.target_table import FAULT_TARGETS
from benchmarks.faults.world import World
from benchmarks.forks import ended, forked, free_port
from benchmarks.verdicts.cases import Drawn
from benchmarks.verdicts.draw import case_of
from benchmarks.verdicts.judge import (
    EndlessError,
    Judgement,
    Tally,
    acted,
    failures_of,
    is_certified,
)

PATIENCE = 300.0
"""Seconds after which a run that has not ended is a failure."""
_STACKS_AFTER = 0.9 * PATIENCE
"""Seconds after which such a run notes in its log where it is."""
_OURS = re.compile(r"(dit_lora/\S+)\", line \d+ in (\w+)")
_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b.*: ")
_AFTER_A_CRASH = 20.0
"""Seconds that other ranks have to end after one has crashed."""


@dataclass
class _Job:
    """One fault under way."""

    fault: Drawn
    pids: list[int]
    log: Path
    output: Path
    began: float = field(default_factory=time.monotonic)
    codes: dict[int, int] = field(default_factory=dict)
    crashed: float | None = None

    def look(self) -> bool:
        """Whether it is over."""
        running = [pid for pid in self.pids if pid not in self.codes]
        self.codes |= ended(running)
        now = time.monotonic()
        if self.crashed is None and any(self.codes.values()):
            self.crashed = now
        if len(self.codes) == len(self.pids):
            return True
        late = now - self.began > PATIENCE
        is_waiting_over = self.crashed is not None and now - self.crashed > _AFTER_A_CRASH
        if late or is_waiting_over:
            self.kill()
        return late or is_waiting_over

    def kill(self) -> None:
        for pid in self.pids:
            if pid not in self.codes:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


@dataclass
class Sweep:
    """The tiny worlds, and the faults that are run in them."""

    folder: Path
    jobs: int
    worlds: dict[str, World] = field(default_factory=dict)

    def build(self, variants: Sequence[str]) -> Iterator[str]:
        """One checkpoint after another, with the clean run that encodes its clips."""
        for variant in variants:
            world = World(self.folder / variant, Accelerator(cpu=True), FAULT_TARGETS[variant])
            world.reference("clean", ())
            self.worlds[variant] = world
            yield variant

    def run(self, faults: Sequence[Drawn]) -> Iterator[Judgement]:
        """Judge every fault, in the order in which they end."""
        waiting, running = list(faults), list[_Job]()
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    running.append(self._start(waiting.pop(0)))
                ended_jobs = [job for job in running if job.look()]
                running = [job for job in running if job not in ended_jobs]
                yield from (_judgement(job) for job in ended_jobs)
                if not ended_jobs:
                    time.sleep(0.02)
        finally:
            for job in running:
                job.kill()

    def _start(self, fault: Drawn) -> _Job:
        log = self.folder / f"{fault.number:03d}.log"
        output = self.folder / f"{fault.number:03d}.json"
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        group |= {"WORLD_SIZE": str(fault.ranks), "LOCAL_WORLD_SIZE": str(fault.ranks)}
        pids = []
        for rank in range(fault.ranks):
            environment = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if fault.ranks > 1 else {}
            pids.append(forked(lambda _: self._play(fault, output), [], environment, log))
        return _Job(fault, pids, log, output)

    def _play(self, fault: Drawn, output: Path) -> None:
        """Run the fault in this forked process, and write its judgement to `output`."""
        began = time.monotonic()
        faulthandler.dump_traceback_later(_STACKS_AFTER, file=2)
        world = self.worlds[fault.variant]
        world.accelerator = Accelerator(cpu=True)
        world.aim = fault.aim
        case, tally = case_of(fault, world), Tally()
        arms_used = [arms.right_kernel, *([case.arm] if case.arm else []), tally.arm]
        messages: list[str] = []
        judgement = Judgement(fault.name, fault.place_name, fault.kind, case.when)
        try:
            observation = world.observe(
                f"fault_{fault.number:03d}",
                arms.at_once(*arms_used),
                case.overrides,
                before_start=case.before_start or (lambda cache: None),
            )
        except EndlessError as error:
            judgement.failures["ended"] = str(error)
        else:
            judgement.failures.update(failures_of(case, world, observation, tally))
            messages = [f"{e['step']} {e['verdict']['cause']} {e['action']}" for e in acted(observation)]
            code = observation.error.exit_code if observation.error else 0
            values = {"told": messages, "exit_code": code, "certified": is_certified(observation)}
            judgement = Judgement(**{**asdict(judgement), **values})
        if world.accelerator.is_main_process:
            seconds = round(time.monotonic() - began, 2)
            values = {"recoveries": tally.recoveries, "seconds": seconds}
            output.write_text(json.dumps({**asdict(judgement), **values}), encoding="utf-8")
            for folder in (world.root / "runs", world.root / "caches"):
                shutil.rmtree(folder / f"fault_{fault.number:03d}", ignore_errors=True)
        while not output.exists():  # gloo may lose what a rank that ends too early has sent
            time.sleep(0.02)


def _judgement(job: _Job) -> Judgement:
    if job.output.exists():
        return Judgement(**json.loads(job.output.read_text(encoding="utf-8")))
    fault, seconds = job.fault, round(time.monotonic() - job.began, 1)
    log = job.log.read_text(encoding="utf-8", errors="replace")
    if job.crashed is not None:
        errors = dict.fromkeys(line.strip() for line in log.splitlines() if _ERROR.match(line))
        codes = [job.codes.get(pid) for pid in job.pids]
        message = f"crashed, exit codes by rank {codes}: {'; '.join(errors) or 'no error was said'}"
    else:
        stack_matches = [_OURS.search(stack) for stack in log.split("Timeout (")[1:]]
        locations = sorted({f"{match[1]} in {match[2]}" for match in stack_matches if match})
        message = f"no end after {seconds:g} s, at {' and at '.join(locations) or 'an unknown place'}"
    return Judgement(fault.name, fault.place_name, fault.kind, "", failures={"ended": message}, seconds=seconds)
