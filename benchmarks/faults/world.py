"""The tiny world in which faults are injected: a random CogVideoX, a few clips, and real runs on them."""

import json
import shutil
from collections.abc import Callable, Hashable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from benchmarks.faults.targets import FaultTargets
from benchmarks.faults.tiny_data import data_of, drop_sample, lora_of, write_samples
from dit_lora.adapters.diffusers_format import ADAPTER_FILE
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.data.cache.cache import TensorCache
from dit_lora.data.cache.shards import get_bad_mark_path
from dit_lora.errors import DitLoraError, InterruptedRunError
from dit_lora.families import get_family
from dit_lora.families.base import TrainableCheckpoint
from dit_lora.families.family import ChatFamily, DiffusionFamily
from dit_lora.guard.fallbacks import preserve_attention_backends
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.precision import choose_precision
from dit_lora.numerics.streams import RandomStreams
from dit_lora.patching import Patches
from dit_lora.training.checkpoints.files import find_checkpoint, is_complete_checkpoint
from dit_lora.training.finish import finish, require_verified
from dit_lora.training.fit import fit
from dit_lora.training.prepare import prepare
from dit_lora.training.run import Run
from dit_lora.training.session.launch import FsdpSettings
from dit_lora.training.session.session import Session, hide_progress_bars, require_free_folder
from dit_lora.training.tasks.registry import get_task_of_family

STEPS = 6
TARGET = "02"  # the clip that faults of one sample are in: its file name begins so

Engine = Literal["ddp", "fsdp2", "zero2"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
Overrides = tuple[tuple[str, Any], ...]
Tensors = dict[str, torch.Tensor]


def engine_of(name: str) -> Engine:
    """Look up an engine by its name; raises `DitLoraError` if it is unknown."""
    for engine in ENGINES:
        if engine == name:
            return engine
    raise DitLoraError(f"no engine is called {name!r}; there are: {', '.join(ENGINES)}")


@dataclass(frozen=True)
class Observation:
    """The events, files and messages of one run, on the main process."""

    events: list[dict[str, Any]]
    error: DitLoraError | None
    adapter: Tensors | None = None
    """The saved adapter; None if none was saved."""
    folder: Path = Path("/nothing")
    cache: Path = Path("/nothing")
    stderr: str = ""


class ArmedCheckpoint:
    """A family's checkpoint whose losses a fault can get at, before and after."""

    def __init__(self, inner: TrainableCheckpoint) -> None:
        self.inner = inner
        self.before: list[Callable[[Tensors, RandomStreams], Tensors]] = []
        self.after: list[Callable[[LossOutput, Tensors, RandomStreams], LossOutput]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def losses(self, transformer: nn.Module, batch: Tensors, streams: RandomStreams) -> LossOutput:
        changed = batch
        for change in self.before:
            changed = change(dict(changed), streams)
        output = self.inner.losses(transformer, changed, streams)
        for change_output in self.after:
            output = change_output(output, batch, streams)
        return output


@dataclass
class Stage:
    """One prepared run that a fault is put into."""

    run: Run
    targets: FaultTargets
    target_clip: str
    """The clip that is to be at fault."""
    checkpoint: ArmedCheckpoint
    patches: Patches = field(default_factory=Patches)
    acted: int | None = None
    """Number of times that a fault that waits for its moment acted on this rank; None without one."""

    @property
    def rank(self) -> int:
        return self.run.accelerator.process_index

    @property
    def ranks(self) -> int:
        return self.run.accelerator.num_processes

    @property
    def transformer(self) -> nn.Module:
        return self.run.transformer

    def module(self, name: str) -> nn.Module:
        """A module by its name, which may be a template of `FaultTargets.named`: `{attention}.{out_proj}`."""
        return self.transformer.get_submodule(self.targets.named(name))

    def trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.transformer.named_parameters() if p.requires_grad}

    def local_tensors(self, name: str | None = None) -> list[torch.Tensor]:
        """This rank's tensors of one trained weight, or of all: parameters, and the parts that ZeRO-2 optimizes."""
        tensors = [p.data for n, p in self.trained().items() if name in (None, n)]
        for key, tensor in self.run.engine.local_state_dict().items():
            if key.endswith("/part" if name is None else f"/{name}/part"):
                tensors.append(tensor)
        return tensors

    def is_target(self, batch: Tensors) -> list[bool]:
        """For each row of a micro-batch, True if it is the target clip's, compared by `targets.mark`."""
        return [torch.equal(row, self._target_id_tensor) for row in batch[self.targets.id_tensor]]

    @cached_property
    def _target_id_tensor(self) -> torch.Tensor:
        clips = self.run.data.training_set
        entry = next(entry for entry in clips.entries if entry.id == self.target_clip)
        return clips.read_sample(entry, 0).tensors[self.targets.id_tensor][0]

    def before_step(self, step: int, act: Callable[[], None]) -> None:
        """Do something once, at the start of a step on this rank."""
        pending = [act]

        def forward(inner: Callable[[int], Any], number: int) -> Any:
            # Once: a step that is taken again after a recovery begins anew.
            if number == step and pending:
                pending.pop()()
            return inner(number)

        self.wrap(self.run.watcher, "record_forward_outputs", forward)

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Call `wrapper(original, ...)` in place of a function or method until the run is over."""
        self.patches.wrap_method(owner, name, wrapper)


Arm = Callable[[Stage], None]


class World:
    """Everything that faults share. Every rank builds an equal one below its own folder's name."""

    def __init__(self, root: Path, accelerator: Accelerator, targets: FaultTargets, engine: Engine = "ddp") -> None:
        self.root = root
        self.accelerator = accelerator
        self.engine: Engine = engine
        """The way in which ranks share a step, where there are several."""
        self.targets = targets
        self.family: DiffusionFamily | ChatFamily = get_family(targets.family)
        self.model = root / "model"
        self.clips = root / "clips"
        self.without = root / "clips_without"
        self.aim = TARGET
        """The beginning of the name of the clip that is to be at fault."""
        self._references: dict[tuple[str, Overrides], Tensors] = {}
        self.shared: dict[Hashable, Observation] = {}
        """Runs that several faults are judged by."""
        hide_progress_bars()
        if accelerator.is_main_process:
            self.family.build_tiny_checkpoint(targets.variant, self.model, 0)
            write_samples(targets, self.clips)
            shutil.copytree(self.clips, self.without)
            drop_sample(targets, self.without, self.target_clip)
        accelerator.wait_for_everyone()

    @property
    def target_clip(self) -> str:
        paths = sorted(self.clips.rglob(f"{self.aim}*"))
        return next(path.relative_to(self.clips).as_posix() for path in paths if path.suffix != ".txt")

    @cached_property
    def target_latent(self) -> torch.Tensor:
        """The latent that the VAE makes of the target."""
        clips = TensorCache(self.root / "caches" / "reference_0" / "videos")
        for entry in clips.iter_entries():
            if entry.sample == self.target_clip:
                return clips.read(entry.key, {})[0]["latent_mean"]
        raise DitLoraError(f"{self.target_clip} was not encoded")

    def recipe(self, name: str, clips: Path, cache: Path, overrides: Overrides) -> Recipe:
        ranks = self.accelerator.num_processes
        values: dict[str, Any] = {
            "model": {"family": self.targets.family, "path": str(self.model), **self.targets.model},
            "data": {
                **self.targets.data,
                "path": str(data_of(self.targets, clips)),
                "cache": str(cache),
                "workers": 0,
            },
            "lora": lora_of(self.targets),
            "optim": {"groups": self.targets.groups},
            "train": {
                "steps": STEPS,
                "batch_size": max(1, 2 // ranks),
                "accumulate": 2 if ranks <= 2 else 1,
                "checkpointing": "none",
                "save_every": 3,
                "keep": 9,
            },
            "validation": {"eval_draws": 0},
            "guard": {
                "snapshot_every": 2,
                "monitor_every": 0,
                "parity_every": 0,
                "preflight": False,
            },
            "run": {"dir": str(self.root / "runs" / name)},
        }
        for name, section in self.targets.sections.items():
            values[name] = {**values.get(name, {}), **section}
        for key, value in overrides:
            *sections, leaf = key.split(".")
            section = values
            for part in sections:
                section = section.setdefault(part, {})
            section[leaf] = value
        return parse_recipe(values, source=name)

    def reference(self, kind: str, overrides: Overrides) -> Tensors:
        """Adapter of a run without a fault: on all clips if `kind` is `clean`, else without the target clip."""
        # The guard's settings change nothing of a run without a fault, which may so serve many.
        run_overrides = tuple(pair for pair in overrides if not pair[0].startswith("guard."))
        key = (kind, run_overrides)
        if key not in self._references:
            clips = self.clips if kind == "clean" else self.without
            name = f"reference_{len(self._references)}"
            observation = self.observe(name, None, run_overrides, clips=clips)
            if observation.error is not None:
                raise observation.error
            self._references[key] = observation.adapter or {}
        return self._references[key]

    def observe(
        self,
        name: str,
        arm: Arm | None,
        overrides: Overrides = (),
        *,
        clips: Path | None = None,
        before_start: Callable[[Path], None] = lambda cache: None,
        fresh_cache: bool = False,
    ) -> Observation:
        """Make one run with a fault in it, from the cache to the saved adapter. Collective."""
        cache = self.root / "caches" / name if fresh_cache else self.cache(name)
        recipe = self.recipe(name, clips or self.clips, cache, overrides)
        output, error = StringIO(), None
        # The guard may switch a backend off for good, and this process has other runs to make.
        with redirect_stderr(output), preserve_attention_backends():
            try:
                if self.accelerator.is_main_process:
                    before_start(cache)
                self.accelerator.wait_for_everyone()
                self._train(recipe, arm)
            except InterruptedRunError as stopped:  # by the user, not by the fault
                raise KeyboardInterrupt from stopped
            except DitLoraError as problem:
                error = problem
        self.accelerator.wait_for_everyone()
        folder = Path(recipe.run.dir)
        return Observation(_events(folder), error, _adapter(folder), folder, cache, output.getvalue())

    def _train(self, recipe: Recipe, arm: Arm | None) -> None:
        checkpoint = ArmedCheckpoint(self.family.open(recipe.model, recipe))
        run = prepared_run(recipe, self.accelerator, checkpoint, self.engine)
        stage = Stage(run, self.targets, self.target_clip, checkpoint)
        try:
            if arm is not None:
                arm(stage)
            fit(run)
            require_verified(run.session, finish(run).verification)
        finally:
            stage.patches.undo()

    def copy_data(self, folder: Path, change: Callable[[Path], None] = lambda folder: None) -> Path:
        """Copy the good data to `folder` and apply `change`, unless it exists. One rank writes it."""
        if self.accelerator.is_main_process and not folder.exists():
            shutil.copytree(self.clips, folder)
            change(folder)
        self.accelerator.wait_for_everyone()
        return folder

    def cache(self, name: str) -> Path:
        """A cache for one run, which starts as a copy of the first run's cache."""
        cache, first_cache = self.root / "caches" / name, self.root / "caches" / "reference_0"
        if self.accelerator.is_main_process and first_cache.exists() and not cache.exists():
            shutil.copytree(first_cache, cache)
        self.accelerator.wait_for_everyone()
        return cache


def prepared_run(recipe: Recipe, accelerator: Accelerator, checkpoint: Any, engine: Engine = "ddp") -> Run:
    """Prepare a run as recipes/lora.py does, in a process that goes on after it."""
    accelerator.gradient_accumulation_steps = recipe.train.accumulate
    family = get_family(recipe.model.family)
    precision = choose_precision(recipe.model.dtype, accelerator.device)
    several = accelerator.num_processes > 1
    sharding = FsdpSettings() if several and engine == "fsdp2" else None
    zero = 2 if several and engine == "zero2" else None
    session = Session(recipe, accelerator, precision, sharding=sharding, zero_stage=zero)
    require_free_folder(session)
    session.lock.release()  # the runs of this process come one after another
    resume_from = find_checkpoint(recipe.train.resume, session.dir)
    task = get_task_of_family(recipe.model.family)
    data = task.prepare_data(session, checkpoint)
    transformer, groups, _ = task.load_trainable(recipe, family, checkpoint, precision.dtype)
    # Counting activations is a third of a tiny run; checkpointing is none as it was loaded.
    return prepare(
        session,
        task,
        checkpoint,
        data,
        transformer,
        groups,
        resume_from,
        apply_checkpointing=lambda setup: None,
    )


def poisoned_files(observation: Observation) -> list[Path]:
    """Files that a run left as valid although they hold a non-finite value. Bundles are evidence and do not count."""
    written = [*observation.folder.rglob("*.safetensors"), *observation.cache.rglob("*.safetensors")]
    return [
        path
        for path in written
        if "bundles" not in path.parts
        and ("checkpoints" not in path.parts or path.name == ADAPTER_FILE or is_complete_checkpoint(path.parent))
        and not all(
            torch.isfinite(tensor).all()
            for name, tensor in load_file(path).items()
            if not get_bad_mark_path(path, name.partition("/")[0]).exists()  # set aside in the cache
        )
    ]


def _events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _adapter(folder: Path) -> Tensors | None:
    """The saved adapter, with any base weights that were trained; None if there is none."""
    files = sorted((folder / "adapter").glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return tensors or None
