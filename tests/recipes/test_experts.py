"""Both experts of Wan 2.2, in turn: two files, each for its own expert, in stock pipelines and in every verb."""

import gc
import json
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from launching import ROOT
from runs import lines, require_short_log
from safetensors.torch import load_file
from samples import apart
from typer.testing import CliRunner

from dit_lora.adapters.diffusers_format import read_run_metadata
from dit_lora.adapters.load import load_adapter
from dit_lora.cli.app import app
from dit_lora.commands.sample import SampleRequest, write_samples
from dit_lora.commands.verify import verify_adapter
from dit_lora.errors import DitLoraError, InterruptedRunError
from dit_lora.hub.push import prepare_publication
from dit_lora.training.tasks.diffusion import task as diffusion_task
from dit_lora.verify.expert_pair import find_expert_results

Main = Callable[[list[str]], None]
PAIR = [f"pytorch_lora_weights_{name}.safetensors" for name in ("high_noise", "low_noise")]
BOUNDARY = 875


@pytest.fixture
def args(tiny_checkpoints: dict[str, Path], shape_clips: Path, tmp_path: Path) -> list[str]:
    """Two steps for each expert on a tiny A14B, with a sample before and after."""
    return [
        str(ROOT / "recipes" / "smoke" / "wan_2.2.yaml"),
        f"model.path={tiny_checkpoints['wan-2.2-t2v-a14b']}",
        "model.part=both",
        f"data.path={shape_clips}",
        f"data.cache={tmp_path / 'cache'}",
        "data.height=32",
        "data.width=48",
        "train.steps=4",
        "train.save_every=1",
        "validation.prompts=[a red disc]",
        "validation.inference_steps=4",
        "validation.guidance_scale=1",
        "validation.eval_draws=0",
        "optim.groups.adapter.lr=0.01",
        f"run.dir={tmp_path / 'run'}",
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place for the run that most tests look at, with its cache; the first of them trains it."""
    return tmp_path_factory.mktemp("experts")


@pytest.fixture
def run(lora_main: Main, args: list[str], tmp_path: Path, trained: Path) -> Path:
    """A run of both as it ended, for a test to change."""
    if not (trained / "run").exists():
        lora_main([*args, f"data.cache={trained / 'cache'}"])
        shutil.copytree(tmp_path / "run", trained / "run")
        shutil.rmtree(tmp_path / "run")
    shutil.copytree(trained / "cache", tmp_path / "cache", dirs_exist_ok=True)
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


@pytest.fixture
def base(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["wan-2.2-t2v-a14b"]


def stock_video(base: Path, high: Path | None, low: Path | None) -> np.ndarray:
    """What the stock pipeline makes with these adapters, loaded as Diffusers says."""
    pipeline: Any = WanPipeline.from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    if high is not None:
        pipeline.load_lora_weights(high.parent, weight_name=high.name)
    if low is not None:
        pipeline.load_lora_weights(low.parent, weight_name=low.name, load_into_transformer_2=True)
    return denoised(pipeline)


def denoised(pipeline: Any) -> np.ndarray:
    """The latents after each of four steps: (4, 1, C, F, H, W)."""
    steps: list[np.ndarray] = []

    def keep(_pipeline: Any, _step: int, _timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        steps.append(given["latents"].numpy().copy())
        return given

    pipeline(
        prompt="a red disc",
        num_frames=9,
        height=32,
        width=48,
        num_inference_steps=4,
        guidance_scale=1.0,
        generator=torch.Generator("cpu").manual_seed(0),
        output_type="latent",
        callback_on_step_end=keep,
    )
    return np.stack(steps)


def test_two_files_each_change_what_their_own_expert_does(run: Path, base: Path, tmp_path: Path) -> None:
    """With both, the video is the trained model's, bit for bit; with one, its own steps differ from the base's."""
    high, low = (run / "adapter" / name for name in PAIR)
    assert [read_run_metadata(file)["part"] for file in (high, low)] == [
        "transformer",
        "transformer_2",
    ]
    trained = WanPipeline.from_pretrained(base)
    trained.set_progress_bar_config(disable=True)
    for name in ("high_noise", "low_noise"):
        load_adapter(trained, run / name / "adapter")
    expected, plain = denoised(trained), stock_video(base, None, None)
    assert np.array_equal(stock_video(base, high, low), expected)
    # With shift 3, two of four timesteps are at 875 or above.
    of_high = [bool(t >= BOUNDARY) for t in trained.scheduler.timesteps]
    assert of_high == [True, True, False, False]
    with_high, with_low = stock_video(base, high, None), stock_video(base, None, low)
    for step, is_high in enumerate(of_high):
        assert np.array_equal(with_high[step], expected[step]) is is_high
        assert np.array_equal(with_low[step], plain[step]) is is_high
        assert not np.array_equal(with_high[step], plain[step])


def test_each_expert_draws_in_its_own_range_and_gets_its_share(
    lora_main: Main, args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the second expert's log repeats no line of the first's start, such as a note on an old key. It is short."""
    old_key = "validation.held_out_draws=0"
    options = ["train.steps=8", "train.high_noise_share=0.25", "validation.prompts=[]", old_key]
    lora_main([*(arg for arg in args if "eval_draws" not in arg), *options])
    log, num_notes = re.subn(r"^note: .*\n(  .*\n)*", "", capsys.readouterr().err, flags=re.MULTILINE)
    assert num_notes == 1
    # Beside the two lines of both runs' times.
    log_lines = require_short_log(re.sub(r"^time: .*\n", "", log, flags=re.MULTILINE), tmp_path / "run")
    starts = ("1 process", "expert: high noise, ", "expert: low noise, ", "adapters of both ")
    assert [sum(line.startswith(start) for line in log_lines) for start in starts] == [1, 1, 1, 1]
    for name, steps, low, high in (("high_noise", 2, BOUNDARY, 999), ("low_noise", 6, 0, 874)):
        step_lines = lines(tmp_path / "run" / name, "metrics.jsonl")
        assert len(step_lines) == steps
        for line in step_lines:
            for part in line["drawn_by_timestep"]:
                start, _, end = part.partition("-")
                assert low <= int(start) <= int(end) <= high


def test_the_second_experts_samples_are_made_with_the_firsts_adapter(run: Path) -> None:
    """After training they are the stock pipeline's with both; before it, with the first expert's alone."""
    low_before, low_after = (
        (run / "low_noise" / "samples" / f"step_{step:06d}" / "prompt_00.mp4").read_bytes() for step in (0, 2)
    )
    high_before = (run / "high_noise" / "samples" / "step_000000" / "prompt_00.mp4").read_bytes()
    high_after = (run / "high_noise" / "samples" / "step_000002" / "prompt_00.mp4").read_bytes()
    assert low_before == high_after != high_before
    assert low_after != low_before


def test_one_expert_alone_trains_the_same_file(lora_main: Main, args: list[str], run: Path, tmp_path: Path) -> None:
    lora_main(
        [
            *args,
            "model.part=transformer_2",
            "train.steps=2",
            f"validation.other_expert={run / 'adapter'}",
            f"run.dir={tmp_path / 'alone'}",
        ]
    )
    single_expert = load_file(tmp_path / "alone" / "adapter" / "pytorch_lora_weights.safetensors")
    pair = load_file(run / "adapter" / PAIR[1])
    assert single_expert.keys() == pair.keys()
    assert all(torch.equal(tensor, pair[name]) for name, tensor in single_expert.items())


def test_an_interrupted_run_goes_on_with_the_expert_that_it_was_at(
    lora_main: Main,
    args: list[str],
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected_tensors = [load_file(run / "adapter" / name) for name in PAIR]
    shutil.rmtree(run / "adapter")
    low = run / "low_noise"
    for path in (low / "checkpoints" / "step_000002", low / "adapter"):
        shutil.rmtree(path)
    (low / "status.json").write_text('{"state": "interrupted", "recipe": "wan_2.2.yaml"}\n')
    trained: list[str] = []
    original = diffusion_task.DiffusionTask.load_trainable

    def counted(self: Any, recipe: Any, *rest: Any) -> Any:
        trained.append(recipe.model.part)
        return original(self, recipe, *rest)

    monkeypatch.setattr(diffusion_task.DiffusionTask, "load_trainable", counted)
    lora_main([*args, "train.resume=auto"])
    assert trained == ["transformer_2"]  # the first has ended well, and is not loaded again
    for before, name in zip(expected_tensors, PAIR, strict=True):
        after = load_file(run / "adapter" / name)
        assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


def test_memory_holds_one_expert_at_a_time(lora_main: Main, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second is loaded, nothing of the first is left."""
    alive: list[int] = []
    earlier_models: list[weakref.ref[Any]] = []
    original = diffusion_task.DiffusionTask.load_trainable

    def watched(self: Any, *rest: Any) -> Any:
        gc.collect()
        alive.append(sum(model_ref() is not None for model_ref in earlier_models))
        loaded = original(self, *rest)
        earlier_models.append(weakref.ref(loaded[0]))
        return loaded

    monkeypatch.setattr(diffusion_task.DiffusionTask, "load_trainable", watched)
    lora_main(args)
    assert alive == [0, 0]


@pytest.mark.thorough
def test_two_ranks_train_both_alike(launch: Any, args: list[str], run: Path, tmp_path: Path) -> None:
    """Their second run has the process group of the first."""
    split = ["train.batch_size=1", f"run.dir={tmp_path / 'two'}"]
    result = launch([*args, *split], ranks=2)
    assert result.returncode == 0, result.stderr
    for name in ("high_noise", "low_noise"):
        one_process, two_ranks = (
            torch.tensor([line["loss"] for line in lines(folder / name, "metrics.jsonl")])
            for folder in (run, tmp_path / "two")
        )
        torch.testing.assert_close(one_process, two_ranks, rtol=1e-5, atol=0)


def test_every_verb_knows_both(run: Path, base: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["verify", str(run), "--json"])
    record = json.loads(result.stdout)
    assert record["passed"]
    assert record["high_noise"]["passed"]
    assert record["low_noise"]["passed"]
    samples = write_samples(
        SampleRequest(run, ("a red disc",), inference_steps=4, guidance_scale=1.0, output_folder=tmp_path)
    )
    before, after = (run / "low_noise" / "samples" / f"step_{step:06d}" / "prompt_00.mp4" for step in (0, 2))
    assert apart(samples[0], after) < apart(after, before) / 10
    assert runner.invoke(app, ["report", str(run)]).exit_code == 0
    page = (run / "low_noise" / "report.html").read_text()
    assert "the expert for low noise" in page
    result = runner.invoke(app, ["report", str(run), "--serve"])
    assert isinstance(result.exception, DitLoraError)
    assert "--serve shows one run" in str(result.exception)
    assert all(verify_adapter(expert, str(base)).passed for expert in find_expert_results(run / "adapter"))


@pytest.mark.parametrize("form", ["diffusers", "folded"])
def test_an_export_of_both_makes_the_trained_video(run: Path, base: Path, tmp_path: Path, form: str) -> None:
    result = CliRunner().invoke(app, ["export", str(run), "--to", form, "--out", str(tmp_path / "kitten")])
    assert result.exit_code == 0, result.output
    files = [tmp_path / "kitten" / f"kitten_{name}.safetensors" for name in ("high_noise", "low_noise")]
    assert sorted((tmp_path / "kitten").iterdir()) == files
    expected = stock_video(base, *(run / "adapter" / name for name in PAIR))
    np.testing.assert_allclose(stock_video(base, *files), expected, rtol=0, atol=1e-5)


def test_comfyuis_names_load_in_the_stock_pipeline_into_their_own_experts(
    run: Path, base: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["export", str(run), "--to", "comfyui", "--out", str(tmp_path / "kitten")])
    assert result.exit_code == 0, result.output
    files = [tmp_path / "kitten" / f"kitten_{name}.safetensors" for name in ("high_noise", "low_noise")]
    for file in files:
        assert all(name.startswith("diffusion_model.blocks.") for name in load_file(file))
    expected = stock_video(base, *(run / "adapter" / name for name in PAIR))
    np.testing.assert_allclose(stock_video(base, *files), expected, rtol=0, atol=1e-5)


def test_a_merged_pipeline_has_both_experts_merged(run: Path, base: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(run), "--to", "merged", "--out", str(tmp_path / "whole")])
    assert result.exit_code == 0, result.output
    expected = stock_video(base, *(run / "adapter" / name for name in PAIR))
    merged = stock_video(tmp_path / "whole", None, None)
    np.testing.assert_allclose(merged, expected, rtol=0, atol=1e-4)
    assert not np.allclose(merged, stock_video(base, None, None), atol=1e-3)


def test_a_push_has_both_files_and_its_code_makes_the_video(run: Path) -> None:
    publication = prepare_publication(run, "me/kitten")
    names = set(publication.files)
    assert {*PAIR, "high_noise/verification.json", "low_noise/verification.json"} <= names
    assert "pytorch_lora_weights.safetensors" not in names
    card = (run / "README.md").read_text()
    assert f'pipe.load_lora_weights("me/kitten", weight_name="{PAIR[0]}")' in card
    assert f'weight_name="{PAIR[1]}", load_into_transformer_2=True)' in card
    assert "steps of the expert for high noise" in card
    expert_publication = prepare_publication(run / "low_noise", "me/kitten")
    assert PAIR[1] in expert_publication.files
    assert PAIR[0] not in expert_publication.files
    assert str(run.parent) not in card


def test_what_does_not_fit_is_refused_before_anything_trains(
    lora_main: Main, args: list[str], run: Path, tmp_path: Path, tiny_checkpoints: dict[str, Path]
) -> None:
    fresh = f"run.dir={tmp_path / 'fresh'}"
    for overrides, message in (
        (["model.part="], "model.part is missing: .* has two experts"),
        (
            [f"model.path={tiny_checkpoints['wan-2.1-t2v']}"],
            "model.part does not apply: .* has one transformer",
        ),
        (
            ["model.part=transformer", f"validation.other_expert={run / 'high_noise'}"],
            "has no adapter of transformer_2 .low_noise., while this run trains transformer",
        ),
        (["train.timesteps={t_min: 0.5}"], "is not within the noise levels that transformer"),
    ):
        with pytest.raises(DitLoraError, match=message) as error:
            lora_main([*args, fresh, *overrides])
        assert error.value.exit_code == 2
        assert not (tmp_path / "fresh").exists()
    shutil.rmtree(run / "high_noise")
    with pytest.raises(DitLoraError, match="already has a run of low_noise"):
        lora_main(args)
    assert not (run / "high_noise").exists()
    pipeline: Any = WanPipeline.from_pretrained(tiny_checkpoints["wan-2.1-t2v"])
    with pytest.raises(DitLoraError, match="was trained on transformer_2, which this WanPipeline"):
        load_adapter(pipeline, run / "adapter" / PAIR[1])


def test_a_run_that_is_stopped_in_its_first_expert_does_not_begin_the_second(
    lora_main: Main, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dit_lora.training import fit

    def stop(*_: Any, **__: Any) -> None:
        raise InterruptedRunError("stopped by a test", 130)

    monkeypatch.setattr(fit, "validate", stop)
    with pytest.raises(InterruptedRunError):
        lora_main(args)
    assert (tmp_path / "run" / "high_noise").exists()
    assert not (tmp_path / "run" / "low_noise").exists()
