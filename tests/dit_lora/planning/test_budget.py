"""A plan's figures against real steps, encoders, optimizers and published sizes; and what it says and refuses."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from family_cases import SMOKES
from fuse_checks import by
from launching import ROOT
from planned_runs import RealRun
from safetensors.torch import load_file
from smoke_recipes import REPRESENTATIVES
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.cli.plan import parse_size
from dit_lora.commands.plan import print_plan
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families.without_weights import config_only_recipe
from dit_lora.planning import search
from dit_lora.planning.budget import GIB, LaunchLayout, MemoryBudget, _compute_disk_bytes, compute_budget
from dit_lora.planning.search import open_estimator, plan_memory
from dit_lora.planning.subject import MemoryEstimator
from dit_lora.report.machine import BAR_WIDTH, build_memory_bar
from dit_lora.training.execution.activation_checkpointing import CheckpointingMode
from dit_lora.training.execution.fake_step import AllocationTracker

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
CPU, FSDP2 = torch.device("cpu"), ("--sharding", "fsdp2", "--ranks", "2")
OFFLOAD = ("train.offload=group", "train.checkpointing=full")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def smoke(name: str, model: Path, *overrides: str) -> Recipe:
    """A recipe for CPUs, without its data."""
    path = ROOT / "recipes" / "smoke" / f"{name}.yaml"
    has_tiles = name in ("cogvideox", "sana", "sana_video")
    size_overrides = ("data.width=128", "data.height=128") if has_tiles else ()
    return load_recipe(path, [f"model.path={model}", "data.path=/nowhere", *size_overrides, *overrides])


def budget_of(recipe: Recipe, *, gpu: bool = False, mode: CheckpointingMode | None = None) -> MemoryBudget:
    return compute_budget(recipe, open_estimator(recipe, is_gpu=gpu), LaunchLayout(), None, mode)


ALONE, PRODIGY = "train.ema=null", ("optim.name=prodigy", "optim.groups.backbone.lr=1")
# Recipe, tiny checkpoint, checkpointing, changes.
RUNS: dict[str, tuple[str, str, CheckpointingMode, tuple[str, ...]]] = {
    "lora, recomputed": ("cogvideox", "cogvideox-5b", "full", ()),
    "lora and connector, accumulated": (
        "cogvideox",
        "cogvideox-5b",
        "selective",
        ("optim.groups.connector.lr=1.0e-4", "train.accumulate=2", "train.batch_size=1"),
    ),
    "full weights": ("dit_scratch", "dit-tiny", "none", (ALONE,)),
    "full weights, 8 bit": ("dit_scratch", "dit-tiny", "none", (ALONE, "optim.name=adamw_8bit")),
    "bf16": ("cogvideox", "cogvideox-2b", "none", ("model.dtype=bf16",)),
    "chat": ("smolvlm2", "smolvlm2", "none", ()),
}
FURTHER: dict[str, tuple[str, str, CheckpointingMode, tuple[str, ...]]] = {
    "lora": ("cogvideox", "cogvideox-5b", "none", ()),
    "lora, batch of 1": ("cogvideox", "cogvideox-5b", "none", ("train.batch_size=1",)),
    "first images": ("cogvideox_i2v", "cogvideox-5b-i2v", "none", ()),
    "sana": ("sana", "sana-600m", "full", ()),
    "sana video": ("sana_video", "sana-video", "selective", ()),
    "chroma": ("chroma", "chroma", "full", ()),
    "anima": ("anima", "anima", "selective", ()),
    "ernie image": ("ernie_image", "ernie-image", "selective", ()),
    "ideogram 4": ("ideogram4", "ideogram-4", "selective", ()),
    "flux": ("flux", "flux-dev", "selective", ()),
    "flux 2, stock": ("flux2", "flux2-klein", "full", ()),
    "flux 2": ("flux2", "flux2-klein", "full", ("kernels.ada_norm=on",)),
    "hunyuan": ("hunyuan_video15", "hunyuan-video-1.5", "selective", ()),
    "kandinsky 5": ("kandinsky5", "kandinsky-5-t2v", "selective", ()),
    "krea 2": ("krea2", "krea2-raw", "selective", ("kernels.ada_norm=on",)),
    "qwen image": ("qwen_image", "qwen-image", "full", ()),
    "qwen image 2.1": ("qwen_image21", "qwen-image-2.1", "selective", ()),
    "ltx": ("ltx_video", "ltx-video-0.9.1", "selective", ()),
    "ltx, timesteps of tokens": ("ltx_video_i2v", "ltx-video", "none", ()),
    "sd3": ("sd3", "sd3.5-medium", "selective", ()),
    "latte": ("latte", "latte", "selective", ()),
    "wan": ("wan_i2v", "wan-2.1-i2v", "full", ()),
    "wan, an expert": ("wan_2.2_i2v", "wan-2.2-i2v-a14b", "selective", ()),
    "wan, timesteps of tokens": ("wan_5b_i2v", "wan-2.2-ti2v-5b", "none", ()),
    "z image": ("z_image", "z-image", "selective", ("kernels.ada_norm=on",)),
    "z image, stock": ("z_image", "z-image", "full", ()),
    "classes": ("video_dit_lora", "video-dit-class", "full", ()),
    "full weights, recomputed": ("dit_scratch", "dit-tiny", "full", (ALONE,)),
    "prodigy": ("dit_scratch", "dit-tiny", "none", (ALONE, *PRODIGY)),
    "qwen": ("qwen", "qwen2.5-vl", "full", ()),
    "videochat2": ("videochat2", "videochat2-mistral", "none", ()),
}
LOOSE = {
    "full weights, 8 bit": 0.13,  # on a CPU its update widens a tensor for a moment
    # A table of positions, 4096 rows whatever the model's size and no weight or buffer, counts as made in the step.
    "qwen image": 0.06,
    "prodigy": 0.06,  # of weights that begin at zero it keeps no copy, which shapes do not tell
}
EVERY = [*RUNS, *(pytest.param(run, marks=pytest.mark.thorough) for run in FURTHER)]


@pytest.mark.parametrize("run", EVERY)
def test_a_real_steps_peak_is_what_was_counted(
    tiny_checkpoints: dict[str, Path], run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, variant, mode, overrides = (RUNS | FURTHER)[run]
    recipe = smoke(name, tiny_checkpoints[variant], *overrides)
    subject = open_estimator(recipe, is_gpu=False)
    budget = compute_budget(recipe, subject, LaunchLayout(), None, mode)
    with by("reference", monkeypatch):
        peak = RealRun(budget.recipe, subject, mode, CPU).peak()
    assert sum(vars(budget.training).values()) == pytest.approx(peak, rel=LOOSE.get(run, 0.03))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_gpus_peak_is_what_was_counted(tiny_checkpoints: dict[str, Path], mode: CheckpointingMode) -> None:
    recipe = smoke("cogvideox", tiny_checkpoints["cogvideox-5b"], "data.frames=49")
    subject = open_estimator(recipe, is_gpu=False)
    computed_bytes = sum(vars(compute_budget(recipe, subject, LaunchLayout(), None, mode).training).values())
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    real = RealRun(recipe, subject, mode, HERE)
    real.step()
    torch.cuda.reset_peak_memory_stats()
    real.step()
    peak, resident_bytes = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated()
    # cuBLAS keeps 32 MiB for each thread that has called it, which plans count as CUDA's own: more than a tiny model.
    torch._C._cuda_clearCublasWorkspaces()
    assert peak - (resident_bytes - torch.cuda.memory_allocated()) == pytest.approx(computed_bytes, rel=0.1)


@contextmanager
def layers_of_5b(folder: Path, layers: int, *overrides: str) -> Iterator[tuple[Recipe, MemoryEstimator]]:
    """The published CogVideoX-5B with fewer layers, and its recipe."""
    path = Path(shutil.copytree(CONFIGS / "CogVideoX-5b", folder / str(layers)))
    config = path / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": layers}))
    recipe = load_recipe(ROOT / "recipes" / "cogvideox" / "5b_t2v.yaml", [f"model.path={path}", *overrides])
    with config_only_recipe(recipe) as local:
        yield local, open_estimator(local, is_gpu=True)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("kernels.lora_linear=off", "kernels.qk_norm_rope=off", "kernels.ada_norm=off"), 20.4),
        ((), 10.3),
    ],
    ids=["stock", "fused"],
)
def test_a_gpus_block_saves_what_was_counted_by_another_way(
    tmp_path: Path, overrides: tuple[str, ...], expected: float
) -> None:
    """20.4 tensors of 17,776 x 3072 bf16 under CUDA's autocast, and half as many with fused kernels."""
    needs_by_layers = {}
    for layers in (2, 3):
        with layers_of_5b(tmp_path, layers, *overrides) as (recipe, subject):
            needs_by_layers[layers] = subject.measure_activations(recipe, subject.shapes[0])
    tensor = (226 + 17550) * 3072 * 2
    a_block = {mode: needs_by_layers[3][mode] - needs_by_layers[2][mode] for mode in needs_by_layers[2]}
    assert a_block["none"] / tensor == pytest.approx(expected, abs=0.15)
    assert a_block["selective"] / tensor == pytest.approx(2.03, abs=0.05)
    assert a_block["full"] / tensor == pytest.approx(1.0, abs=0.02)


def test_storages_count_while_they_live() -> None:
    source = torch.ones(8)
    with AllocationTracker([source]) as live:
        tensor = (source + 1).exp()  # the sum is gone when its exponential is there
        view = tensor[2:]
    assert (live.max_bytes, live.current_bytes, view.numel()) == (4 * 16, 4 * 8, 6)
    del tensor, view
    assert live.current_bytes == 0


ENCODED = (*REPRESENTATIVES.values(), "cogvideox_i2v", "wan_flf2v")


@pytest.mark.parametrize("name", ENCODED)
def test_samples_are_what_encoders_make_of_them(tiny_checkpoints: dict[str, Path], name: str) -> None:
    recipe = smoke(name, tiny_checkpoints[SMOKES[name].variant])
    subject = open_estimator(recipe, is_gpu=False)
    (shape,) = subject.shapes
    pixels = torch.zeros(shape.frames, 3, shape.height, shape.width, dtype=torch.uint8)
    encode = subject.checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    names = [recipe.validation.prompts[0]] if recipe.validation.prompts else [""]
    texts = subject.checkpoint.encoders.load_text_encoder(torch.float32, CPU)(names)
    encoded = encode(pixels) | {key: tensor[0] for key, tensor in texts.items()}
    assert subject.get_spec(shape) == {n: (t.shape, t.dtype) for n, t in encoded.items()}
    with AllocationTracker() as live:
        encode(pixels)
    assert subject.video_encoder.peak_bytes == pytest.approx(live.max_bytes, rel=0.1)


def test_tiles_of_the_vae_are_counted(tiny_checkpoints: dict[str, Path]) -> None:
    peaks = []
    for vae_tiling in ("false", "true"):
        overrides = ("data.height=512", "data.width=512", f"data.vae_tiling={vae_tiling}")
        recipe = smoke("wan", tiny_checkpoints[SMOKES["wan"].variant], *overrides)
        subject = open_estimator(recipe, is_gpu=False)
        peaks.append((subject.video_encoder.peak_bytes, subject.video_decoding_memory.peak_bytes))
    assert all(tiled < 0.8 * whole for whole, tiled in zip(*peaks, strict=True))


def test_tiles_that_do_not_fit_are_refused_as_in_a_run(tiny_checkpoints: dict[str, Path]) -> None:
    sizes = ("data.height=96", "data.width=96", "data.vae_tiling=true")
    recipe = smoke("cogvideox", tiny_checkpoints[SMOKES["cogvideox"].variant], *sizes)
    with pytest.raises(DitLoraError, match="do not fit these heights and widths"):
        open_estimator(recipe, is_gpu=False).video_encoder  # noqa: B018 -- counted when it is read


@pytest.fixture(scope="module")
def bare(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that has only configs."""
    folder = tmp_path_factory.mktemp("bare") / "cogvideox-5b"
    ignored = shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(tiny_checkpoints["cogvideox-5b"], folder, ignore=ignored))


def test_ranks_share_what_a_launch_shares_out(bare: Path) -> None:
    recipe = smoke("cogvideox", bare, "optim.groups.connector.lr=1.0e-3")
    with config_only_recipe(recipe) as local:
        subject = open_estimator(local, is_gpu=False)
        single, ddp, zero2, fsdp2 = (
            compute_budget(local, subject, launch, None).training
            for launch in (
                LaunchLayout(),
                LaunchLayout(4),
                LaunchLayout(4, "zero2"),
                LaunchLayout(4, "fsdp2"),
            )
        )
    assert (single.buckets, ddp.buckets, zero2.buckets) == (0, single.trained, 0)
    assert sum(vars(ddp).values()) == sum(vars(single).values()) + single.trained
    assert (zero2.optimizer, zero2.weights) == (single.optimizer // 4, single.weights)
    assert (fsdp2.optimizer, fsdp2.weights) == (single.optimizer // 4, single.weights // 4)
    assert fsdp2.gathered > 0 == zero2.gathered
    assert {footprint.activations for footprint in (single, ddp, zero2, fsdp2)} == {single.activations}


def test_a_quantised_base_takes_what_the_real_one_takes(tiny_checkpoints: dict[str, Path]) -> None:
    recipe = smoke("cogvideox", tiny_checkpoints["cogvideox-5b"], "model.quantize=int8")
    subject = open_estimator(recipe, is_gpu=False)
    real = RealRun(recipe, subject, "none", CPU).model
    frozen = sum(p.nbytes for p in real.parameters() if not p.requires_grad)
    assert subject.count_weights(recipe).frozen_bytes == frozen
    offloaded = recipe.model_copy(update={"train": recipe.train.model_copy(update={"offload": "group"})})
    weights = subject.count_weights(offloaded)
    assert 0 < weights.frozen_bytes - weights.block_bytes < weights.frozen_bytes / 2


def invoke(*arguments: object) -> tuple[int, str]:
    command = ["plan", *map(str, arguments)]
    result = CliRunner().invoke(app, command)
    if isinstance(result.exception, DitLoraError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


def test_what_does_not_fit_is_told_a_change_with_which_it_does(bare: Path) -> None:
    """Without weights, without data, without a GPU."""
    path = ROOT / "recipes" / "smoke" / "cogvideox.yaml"
    command = [
        path,
        f"model.path={bare}",
        "data.path=/nowhere",
        "train.batch_size=16",
        "validation.prompts=[]",
        "--json",
    ]
    code, output = invoke(*command)
    record = json.loads(output)
    assert (code, record["fits"], record["gpu"], record["cheapest_change"]) == (0, True, None, None)
    needs = record["phases"]["training"]
    assert needs == max(record["phases"].values())
    assert record["activations"]["9x64x96"]["none"] == record["training"]["activations"]
    code, output = invoke(*command, "--gpu", f"{needs - 1e-4}GiB")
    record = json.loads(output)
    change = record["cheapest_change"]
    assert (code, record["fits"], record["phases"]["training"]) == (1, False, needs)
    assert change["overrides"] == ["train.checkpointing=selective"]
    # The studio draws the same record: its parts fill the bar up to what training needs, just past the end of the GPU.
    bar = build_memory_bar(record)
    assert (bar.fits, bar.changes) == (False, "train.checkpointing=selective")
    assert bar.headline == f"does not fit: {needs:.3g} of {needs - 1e-4:.3g} GiB"
    tensors = [name.replace("_", " ") for name, size in record["training"].items() if size]
    assert [part.name for part in bar.parts] == [*tensors, "CUDA and rounding"]
    assert bar.parts[-1].x + bar.parts[-1].width == pytest.approx(BAR_WIDTH, abs=0.2)
    assert bar.limit_x == pytest.approx(BAR_WIDTH * (needs - 1e-4) / needs, abs=0.1)
    code, output = invoke(*command, *change["overrides"], "--gpu", f"{needs - 1e-4}GiB")
    assert code == 0
    assert json.loads(output)["phases"]["training"] == pytest.approx(change["needs"])


def test_a_plan_is_told_as_it_is_typed(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "recipes" / "smoke" / "cogvideox.yaml"
    command = [
        f"model.path={bare}",
        "data.path=/nowhere",
        "validation.prompts=[]",
        "train.batch_size=16",
    ]
    planned = plan_memory(path, command, LaunchLayout(), int(0.7685 * GIB))
    print_plan(planned)
    output = capsys.readouterr().out
    assert "  train.checkpointing=selective\n" in output
    assert "does not fit: 0.77 of 0.77 GiB" in output


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (20, None),
        (13, ["train.checkpointing=selective"]),
        (10, ["train.checkpointing=full"]),
        (9, ["model.quantize=nf4"]),
        (7, ["train.checkpointing=selective", "train.batch_size=1", "train.accumulate=2"]),
        (
            3,
            [
                "train.checkpointing=full",
                "train.batch_size=1",
                "train.accumulate=2",
                "model.quantize=fp8",
            ],
        ),
        (0, None),
    ],
)
def test_the_cheapest_change_is_found(
    bare: Path, monkeypatch: pytest.MonkeyPatch, room: int, expected: list[str] | None
) -> None:
    """With one, if one does; else with several, and none of them stronger than it must be."""
    monkeypatch.setattr(search, "compute_budget", made_up_count)
    path = ROOT / "recipes" / "smoke" / "cogvideox.yaml"
    planned = plan_memory(path, [f"model.path={bare}", "data.path=/nowhere"], LaunchLayout(), room)
    assert planned.budget.fits == (room == 20)
    assert (list(planned.change.overrides) if planned.change else None) == expected


def made_up_count(recipe: Recipe, subject: MemoryEstimator, launch: LaunchLayout, gpu: int | None) -> Any:
    saving = {None: 0, "fp8": 2, "nf4": 11 * (recipe.train.batch_size == 2)}[recipe.model.quantize]
    need_per_sample = {"none": 10, "selective": 6, "full": 5}[recipe.train.checkpointing]
    needs = recipe.train.batch_size * need_per_sample - saving
    fits = gpu is None or needs <= gpu
    planned = SimpleNamespace(recipe=recipe, launch=launch, gpu_bytes=gpu, needed_bytes=needs, fits=fits)
    planned.checkpointing_mode, planned.phase_bytes = "none", {"training": needs}
    return planned


@pytest.mark.parametrize("read", [torch.any, torch.nonzero])
def test_a_model_that_reads_values_is_refused_in_one_line(
    bare: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    forward = CogVideoXTransformer3DModel.forward

    def read_values(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert len(read(hidden_states)) if read is torch.nonzero else read(hidden_states)
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(CogVideoXTransformer3DModel, "forward", read_values)
    code, output = invoke(ROOT / "recipes" / "smoke" / "cogvideox.yaml", f"model.path={bare}", "data.path=/nowhere")
    assert (code, len(output.splitlines())) == (2, 1), output
    assert "the memory of family cogvideox cannot be counted: a model reads values of tensors (aten." in output


def test_bad_input_is_refused(bare: Path, tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "smoke" / "cogvideox.yaml"
    for arguments, message in (
        ((f"model.path={bare}", "--gpu", "much"), "--gpu must be a size"),
        (("model.path=someone/a-model",), "it cannot be downloaded"),
        ((f"model.path={tmp_path}",), "is not a Diffusers checkpoint"),
        ((f"model.path={bare}", "--sharding", "fsdp2"), "needs --ranks 2"),
        ((f"model.path={bare}", "optim.name=adamw_8bit", *FSDP2), "optim.name=adamw_8bit: set"),
        ((f"model.path={bare}", *OFFLOAD, "model.quantize=fp8"), "do not work together"),
        ((f"model.path={bare}", "data.frames=10"), "data.frames must be 8n + 1"),
    ):
        code, output = invoke(recipe, *arguments)
        assert (code, message in output) == (2, True), output
    assert [parse_size(text) for text in ("24GiB", "24", "80 GB")] == [
        24 * GIB,
        24 * GIB,
        80 * 10**9,
    ]


@pytest.mark.parametrize(
    ("variant", "recipe", "components"),
    [
        ("flux-dev", "flux", ("text_encoder", "text_encoder_2")),
        ("ltx-2.3", "ltx2", ("text_encoder", "connectors")),
    ],
)
def test_text_encoders_that_are_loaded_together_are_counted_together(
    variant: str, recipe: str, components: tuple[str, ...], tiny_checkpoints: dict[str, Path]
) -> None:
    path = tiny_checkpoints[variant]
    encoder = open_estimator(smoke(recipe, path), is_gpu=False).caption_encoder
    stored_bytes = {
        name: sum(t.nbytes for file in (path / name).glob("*.safetensors") for t in load_file(file).values())
        for name in components
    }
    assert encoder is not None
    assert encoder.weight_bytes == pytest.approx(sum(stored_bytes.values()), rel=0.01)
    assert encoder.peak_bytes > 0.1 * max(stored_bytes.values())


def test_the_adapters_at_saves_are_counted(tiny_checkpoints: dict[str, Path]) -> None:
    estimator: Any = SimpleNamespace(is_chat=True)
    weights: Any = SimpleNamespace(trained_bytes=10, frozen_bytes=1000, trained_parameters=())
    key = "adapters of older checkpoints"

    def count_bytes(*overrides: str) -> dict[str, int]:
        saves = ("train.steps=95", "train.save_every=10", "train.keep=2")
        recipe = smoke("cogvideox", tiny_checkpoints["cogvideox-2b"], *saves, *overrides)
        return _compute_disk_bytes(recipe, estimator, weights)

    # Ten saves: three checkpoints, with an adapter each, and the adapters of the others.
    assert count_bytes() == {"checkpoints": 3 * 20, "result": 10, key: 70}
    assert count_bytes("train.keep_adapters=2")[key] == 20
    assert key not in count_bytes("optim.groups.connector.lr=1e-5")
    assert count_bytes("lora.init=pissa")[key] == 140
