"""The host waits in a healthy step for one copy of one row, a step late. Counted on the CPU, where nothing waits.

So do copies to the device that are not queued. Of models of Transformers only the code of this project is counted.
"""

import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chat_runs import common, write_data
from launching import ROOT
from packaging.version import Version
from runs import without_verification
from smoke_recipes import REPRESENTATIVES, RUNS, smoke_args
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves

from dit_lora.config.load import load_recipe
from dit_lora.data.loading.batch import HOST_TENSORS, Batch
from dit_lora.families import DIFFUSION_FAMILIES
from dit_lora.training import loop
from dit_lora.training.fit import RunCallbacks
from dit_lora.training.recovery.monitoring import StepMonitor
from dit_lora.training.step import StepResult

Main = Callable[[list[str]], None]
STEPS = 4
OPTIONS = [
    f"train.steps={STEPS}",
    "train.accumulate=2",
    "train.ema=0.9",
    "guard.preflight=false",
    "guard.monitor_every=0",
    "guard.parity_every=0",
    "kernels.finite_norm=off",  # Triton's interpreter reads what a GPU does not
]
ONCE_EACH = {step: ["cpu"] for step in range(1, STEPS + 1)}
TWO_IN_FLIGHT = [
    *("launch 1", "update 1", "read 1"),
    *("launch 2", "update 2"),
    *("launch 3", "read 2", "update 3"),
    *("launch 4", "read 3", "update 4"),
    "read 4",
]
"""A step's update waits for the row of the step before it, which is read with this step's forward and backward queued;
the first is told of when it is taken."""
METHODS = ("cpu", "tolist", "numpy")  # no op on the CPU tells of them
OPS = {
    torch.ops.aten._local_scalar_dense.default: "item",
    torch.ops.aten.nonzero.default: "nonzero",
    torch.ops.aten.masked_select.default: "masked_select",
    torch.ops.aten.equal.default: "equal",
    torch.ops.aten.repeat_interleave.Tensor: "repeat_interleave",
    torch.ops.aten._unique2.default: "unique",
}
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)


class Reads(TorchDispatchMode):
    """Follows what would be on the device, from weights and batches on, and notes each read of it by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.where: list[str] = []
        self.by_step: dict[int, list[str]] = {}
        self.order: list[str] = []
        self.elsewhere: list[str] = []
        """Where in Transformers the host waits."""
        self.is_paused = False
        """True while `on_step` runs, which may read what it likes."""
        self._there: dict[int, torch.UntypedStorage] = {}

    @property
    def in_step(self) -> bool:
        return _get_current_dispatch_mode() is self

    def put(self, tensors: Any) -> None:
        """These are on the device."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._there[storage._cdata] = storage  # held: no other storage takes its number

    def note(self, name: str, *values: Any) -> None:
        if any(self._has(value) for value in values):
            self.add(name)

    def add(self, name: str) -> None:
        if self.is_paused:
            return
        stack = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
        where = f"{name}: {''.join(traceback.format_list(stack[-4:]))}"
        caller = next(frame.filename for frame in reversed(stack) if "/torch/" not in frame.filename)
        if "/transformers/" in caller:
            self.elsewhere.append(where)
        else:
            self.found.append(name)
            self.where.append(where)

    def _has(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._there

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        if func in OPS:
            self.note(OPS[func], *leaves)
        if func in INDEXING:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            self.note("a mask as an index", *masks)
        output = func(*args, **(kwargs or {}))
        if any(self._has(value) for value in leaves):
            self.put(t for t in tree_leaves(output) if isinstance(t, torch.Tensor))
        return output


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """The reads of every step of the runs within it, and the order in which steps are launched, updated and read."""
    reads, to = Reads(), Batch.to
    train_step, read_metrics, on_step = loop._train_step, loop._read_metrics, RunCallbacks.on_step
    launch, update = StepMonitor.record_forward_outputs, StepMonitor.before_update

    def step(given: loop.TrainingLoopComponents, state: Any, number: int) -> bool:
        bare = given.engine.unwrapped_model
        reads.put([*bare.parameters(), *bare.buffers()])
        with reads, Sends(reads):
            goes_on = train_step(given, state, number)
        reads.by_step.setdefault(number, []).extend(reads.found)
        reads.found.clear()
        return goes_on

    def read(given: loop.TrainingLoopComponents, pending: Any) -> Any:
        """Counted with the step that is read, and not with the one under way."""
        earlier = reads.found.copy()
        outcome = read_metrics(given, pending)
        reads.order.append(f"read {pending.step.number}")
        reads.by_step.setdefault(pending.step.number, []).extend(reads.found[len(earlier) :])
        reads.found[:] = earlier
        return outcome

    def followed(callbacks: RunCallbacks, result: StepResult) -> None:
        reads.is_paused = True
        with _disable_current_modes():
            on_step(callbacks, result)
        reads.is_paused = False

    def launched(watcher: StepMonitor, number: int) -> Any:
        reads.order.append(f"launch {number}")
        return launch(watcher, number)

    def updated(watcher: StepMonitor, number: int) -> None:
        reads.order.append(f"update {number}")
        update(watcher, number)

    def moved(batch: Batch, device: torch.device) -> Batch:
        on_device = to(batch, device)
        reads.put(tensor for name, tensor in on_device.tensors.items() if name not in HOST_TENSORS)
        reads.put(on_device.random_inputs.tensors.values() if on_device.random_inputs is not None else ())
        return on_device

    with patch.context() as during:
        during.setattr(loop, "_train_step", step)
        during.setattr(loop, "_read_metrics", read)
        during.setattr(RunCallbacks, "on_step", followed)
        during.setattr(StepMonitor, "record_forward_outputs", launched)
        during.setattr(StepMonitor, "before_update", updated)
        during.setattr(Batch, "to", moved)
        for name in METHODS:
            during.setattr(torch.Tensor, name, noting(reads, name), raising=False)
        yield reads


def noting(reads: Reads, name: str) -> Callable[..., Any]:
    """A method of tensors that is noted; what `cpu` gives is a copy, as from a GPU."""
    method = getattr(torch.Tensor, name)

    def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not reads.in_step:
            return method(tensor, *args, **options)
        reads.note(name, tensor)
        with _disable_current_modes():
            result = method(tensor, *args, **options)
            return result.clone() if name == "cpu" else result

    return noted


class Sends(TorchFunctionMode):
    """Notes `torch.tensor` where it is given a device: it waits there until all that is queued is done."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.tensor and options.get("device") is not None:
            self.reads.add("torch.tensor")
        return func(*args, **options)


TRIED = tuple(REPRESENTATIVES.values())
# Whose steps read most on the host: masks and lengths of captions, sizes of references, given frames, classes.
QUICK = {
    *(
        "anima",
        "cogvideox",
        "dit",
        "ideogram4",
        "ltx2",
        "qwen_image_edit_plus",
        "wan_5b_i2v",
    ),
}
# References, masks, sound and first frames, of those families and with each other.
GIVEN_MORE = (
    *("flux_kontext_masked", "flux2_dev_edit", "qwen_image_edit_masked", "ltx_video"),
    *("ltx2_sound", "ltx2_i2v", "ltx2_ic_lora", "ltx2_ic_lora_sound"),
)


@pytest.fixture(autouse=True)
def healthy_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run does after its last step is not counted."""
    without_verification(monkeypatch)


def test_a_recipe_of_every_diffusion_family_is_tried() -> None:
    recipes = [load_recipe(ROOT / "recipes" / "smoke" / f"{name}.yaml") for name in TRIED]
    assert {recipe.model.family for recipe in recipes} == set(DIFFUSION_FAMILIES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough)
        for name in (*TRIED, "qwen_image_edit_plus", *GIVEN_MORE)
    ],
)
def test_a_healthy_step_is_read_once(
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """With two micro-steps, masks of captions, an average of the weights, dropout, clipping, and metrics written."""
    RUNS[name].prepare(monkeypatch)
    args = [*smoke_args(name, tiny_checkpoints, shape_clips, tmp_path), *OPTIONS]
    args += ["lora.dropout=0.1", "train.batch_size=2", f"run.dir={tmp_path / 'run'}"]
    args += ["validation.prompts=[]", "validation.references=[]"]
    args += ["validation.eval_draws=0"]
    with counted(monkeypatch) as reads:
        lora_main(args)
    assert reads.by_step == ONCE_EACH, "\n".join(reads.where)
    assert reads.order == TWO_IN_FLIGHT


CHATS = {
    "videochat2": "videochat2-mistral",
    "llava_next_video": "llava-next-video",
    "qwen": "qwen2.5-vl",
    "smolvlm2": "smolvlm2",
}
# Transformers 5.17 writes this model's image features by a mask as an index, which reads the mask; 5.23 does not.
OLD = pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="Transformers' own code reads")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[OLD] if name == "smolvlm2" else []) for name in CHATS])
def test_a_healthy_step_of_a_chat_model_is_read_once(
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Count what our own code reads, with videos, images and texts; Transformers' models may read more."""
    data = write_data(tmp_path / "data")
    args = common(name, tiny_checkpoints[CHATS[name]], data, tmp_path)
    steps = 6  # enough for each kind of media
    with counted(monkeypatch) as reads:
        lora_main([*args, f"run.dir={tmp_path / 'run'}", *OPTIONS, f"train.steps={steps}"])
    once_each = {step: ["cpu"] for step in range(1, steps + 1)}
    assert reads.by_step == once_each, "\n".join(reads.where)
    assert reads.order[:4] == TWO_IN_FLIGHT[:4]
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert {kind for line in lines for kind in line["loss_by_media"]} == {"video", "image", "text"}
    if name == "videochat2":
        assert reads.elsewhere == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_waits_for_the_gpu_by_the_event_of_the_row_alone(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch itself counts waits for a stream; the first step creates the tensors that stay."""
    waits: list[list[str]] = []
    train_step, on_step = loop._train_step, RunCallbacks.on_step

    def step(*args: Any) -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return train_step(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                waits.append([str(warning.message) for warning in caught if "synchronizing" in str(warning.message)])

    def followed(*args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        on_step(*args)
        torch.cuda.set_sync_debug_mode("warn")

    monkeypatch.setattr(loop, "_train_step", step)
    monkeypatch.setattr(RunCallbacks, "on_step", followed)
    lora_main([*smoke, f"run.dir={tmp_path / 'run'}", *OPTIONS])
    assert len(waits) == STEPS
    assert waits[1:] == [[]] * (STEPS - 1), waits
