"""What the data section asks of a run: buckets, windows, several sources, no cache, rejects left out."""

import json
import shutil
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_clips import zero_the_last_packets
from runs import adapter, lines, same_adapter, trajectory

from dit_lora.data.cache.cache import TensorCache
from dit_lora.data.loading.batch import Batch
from dit_lora.data.loading.encoded import CachedClips
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.errors import DitLoraError

Main = Callable[[list[str]], None]


@pytest.fixture
def mixed(smoke: list[str], shape_clips: Path, tmp_path: Path) -> list[str]:
    """Landscape and portrait clips of several lengths, and images, in buckets and windows."""
    size = {"height": 48, "width": 32}
    write_shapes(tmp_path / "tall", clips=3, frames=26, fps=8, **size)
    write_shapes(tmp_path / "stills", clips=2, frames=1, fps=8, **size)
    sources = [
        {"path": str(shape_clips), "repeats": 2},
        {"path": str(tmp_path / "tall"), "loss_weight": 0.5},
        {"path": str(tmp_path / "stills"), "caption": "a still"},
    ]
    return [
        *smoke,
        "data.path=",
        f"data.sources={json.dumps(sources)}",
        "data.buckets={frames: [1, 9, 17], aspect_ratios: ['3:2', '2:3']}",
        "data.frames=17",
        "data.windows=all",
        "train.batch_size=2",
        "train.accumulate=1",
        "data.caption_dropout=0.3",
        "validation.eval_draws=1",
    ]


def test_a_run_over_buckets_windows_and_sources_resumes_bit_for_bit(
    lora_main: Main, mixed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uninterrupted, parts = tmp_path / "straight", tmp_path / "parts"
    lora_main([*mixed, "train.steps=8", f"run.dir={uninterrupted}"])
    assert "17x48x32" in capsys.readouterr().err
    lora_main([*mixed, "train.steps=3", f"run.dir={parts}"])
    lora_main([*mixed, "train.steps=8", "train.resume=auto", f"run.dir={parts}"])
    assert trajectory(parts) == trajectory(uninterrupted)
    assert same_adapter(parts, uninterrupted)


def _without_draws(loader: Callable[..., Iterable[Batch]]) -> Callable[..., Iterable[Batch]]:
    return lambda clips, how: loader(clips, replace(how, get_draw_functions=None))


def test_noise_has_the_same_bits_whoever_draws_it(
    lora_main: Main, mixed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers ahead, the step's own process as it reads, and the step itself; over shapes of several sizes."""
    mixed = [*mixed, "train.steps=6", "train.accumulate=2"]
    runs = {"worker": ["data.workers=2"], "reader": [], "step": []}
    for name, options in runs.items():
        if name == "step":
            monkeypatch.setattr(CachedClips, "make_loader", _without_draws(CachedClips.make_loader))
        lora_main([*mixed, *options, f"run.dir={tmp_path / name}"])
    for name in runs:
        assert trajectory(tmp_path / name) == trajectory(tmp_path / "step")
        assert same_adapter(tmp_path / name, tmp_path / "step")


def test_how_a_step_over_buckets_is_split_changes_only_rounding(
    lora_main: Main, mixed: list[str], tmp_path: Path
) -> None:
    unsplit, split = tmp_path / "whole", tmp_path / "split"
    lora_main([*mixed, "train.steps=6", f"run.dir={unsplit}"])
    halves = ["train.batch_size=1", "train.accumulate=2"]
    lora_main([*mixed, *halves, "train.steps=6", f"run.dir={split}"])
    losses, split_losses = (torch.tensor(trajectory(run)) for run in (unsplit, split))
    torch.testing.assert_close(losses, split_losses, rtol=1e-5, atol=0)


@pytest.mark.parametrize("flip", [False, True], ids=["clips", "mirrored images"])
def test_encoding_on_the_fly_trains_as_the_cache_does_bit_for_bit(
    lora_main: Main, smoke: list[str], mixed: list[str], tmp_path: Path, flip: bool
) -> None:
    images = [f"data.path={tmp_path / 'stills'}", "data.frames=1", "data.fps=", "data.flip=true"]
    args = [*smoke, *images] if flip else mixed
    args = [*args, "train.steps=4", "data.workers=1"]
    lora_main([*args, f"run.dir={tmp_path / 'cached'}"])
    shutil.rmtree(tmp_path / "cache")
    lora_main([*args, "data.precompute=false", f"run.dir={tmp_path / 'live'}"])
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert trajectory(tmp_path / "live") == trajectory(tmp_path / "cached")
    assert same_adapter(tmp_path / "live", tmp_path / "cached")
    eval_losses = [lines(tmp_path / run, "eval_loss.jsonl") for run in ("live", "cached")]
    assert eval_losses[0] == eval_losses[1]


def test_a_clip_that_breaks_while_it_is_encoded_on_the_fly_is_left_out(
    lora_main: Main, smoke: list[str], shape_clips: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(shape_clips, tmp_path / "broken"))
    broken = sorted(folder.glob("*.mp4"))[0]
    zero_the_last_packets(broken)
    run = tmp_path / "run"
    live = ["data.precompute=false", f"data.path={folder}", "train.steps=6", "train.batch_size=2"]
    lora_main([*smoke, *live, f"run.dir={run}"])
    events = [line for line in lines(run, "events.jsonl") if line["sample_ids"] == [broken.name]]
    assert [event["verdict"]["cause"] for event in events] == ["data"]
    assert "decoded" in events[0]["verdict"]["words"]
    assert all(torch.isfinite(tensor).all() for tensor in adapter(run).values())
    assert len(trajectory(run)) == 6


def test_a_samples_weight_multiplies_its_loss_and_nothing_else(
    lora_main: Main, smoke: list[str], shape_clips: Path, tmp_path: Path
) -> None:
    losses = {}
    for weight in (1.0, 0.25):
        run = tmp_path / str(weight)
        source = json.dumps([{"path": str(shape_clips), "loss_weight": weight}])
        lora_main([*smoke, "data.path=", f"data.sources={source}", "train.steps=1", f"run.dir={run}"])
        losses[weight] = trajectory(run)[0][1]
    assert losses[0.25] == pytest.approx(losses[1.0] / 4, rel=1e-6)


def test_rejects_are_refused_all_at_once_or_left_out_as_if_never_there(
    lora_main: Main, smoke: list[str], shape_clips: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(shape_clips, tmp_path / "with"))
    table = folder / "metadata.jsonl"
    bad = {"no.mp4": None, "cut.mp4": b"no video", "dark.mp4": b""}
    with table.open("a") as stream:
        for name, content in bad.items():
            stream.write(json.dumps({"file_name": name, "text": "x"}) + "\n")
            if content is not None:
                (folder / name).write_bytes(content)
    args = [*smoke, "train.steps=3"]
    with pytest.raises(DitLoraError) as refused:
        lora_main([*args, f"data.path={folder}", f"run.dir={tmp_path / 'refused'}"])
    assert all(name in str(refused.value) for name in bad)
    assert "data.rejects=skip" in str(refused.value)
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()
    skip, never = tmp_path / "skip", tmp_path / "never"
    lora_main([*args, f"data.path={folder}", "data.rejects=skip", f"run.dir={skip}"])
    lora_main([*args, f"run.dir={never}"])
    assert trajectory(skip) == trajectory(never)
    assert same_adapter(skip, never)
    (event,) = lines(skip, "events.jsonl")
    assert event["kind"] == "data_rejected"
    assert sorted(event["sample_ids"]) == sorted(bad)
    assert all(name in event["verdict"]["words"] for name in bad)
    lora_main(
        [
            *args,
            f"data.path={folder}",
            "data.rejects=skip",
            "train.steps=4",
            "train.resume=auto",
            f"run.dir={skip}",
        ]
    )
    assert len(lines(skip, "events.jsonl")) == 1


def test_a_run_whose_samples_are_all_rejected_says_so(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.mp4").write_bytes(b"no video")
    (tmp_path / "one" / "a.txt").write_text("a caption")
    args = [*smoke, f"data.path={tmp_path / 'one'}", "data.rejects=skip", f"run.dir={tmp_path}/run"]
    with pytest.raises(DitLoraError, match="no sample is left"):
        lora_main(args)


def test_the_largest_bucket_runs_before_the_first_step_and_says_if_it_does_not_fit(
    lora_main: Main, mixed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever bucket the first step takes."""
    from dit_lora.families.cogvideox.text_to_video import CogVideoXDenoiser

    stock = CogVideoXDenoiser.losses
    ran: list[tuple[int, ...]] = []

    def losses(self: CogVideoXDenoiser, model: torch.nn.Module, batch: dict, *rest: Any) -> Any:
        latents = batch["latent_mean"]
        ran.append(tuple(latents.shape))
        if latents.device.type != "meta" and latents.numel() >= 2 * 4 * 5 * 4 * 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return stock(self, model, batch, *rest)

    monkeypatch.setattr(CogVideoXDenoiser, "losses", losses)
    run = tmp_path / "run"
    quiet = ["validation.eval_draws=0", "train.checkpointing=none"]
    with pytest.raises(DitLoraError, match=r"2 samples of the largest shape, 17x(48x32|32x48), does"):
        lora_main([*mixed, *quiet, "train.steps=3", f"run.dir={run}"])
    assert not (run / "metrics.jsonl").exists() or not lines(run, "metrics.jsonl")
    assert ran[-1][0] == 2


def test_a_tar_trains_as_the_folder_that_it_was_packed_from(
    lora_main: Main, smoke: list[str], shape_clips: Path, tmp_path: Path
) -> None:
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "0.tar", "w") as tar:
        for line in (shape_clips / "metadata.jsonl").read_text().splitlines():
            sample = json.loads(line)
            caption = tmp_path / "caption.txt"
            caption.write_text(sample["text"])
            tar.add(shape_clips / sample["file_name"], sample["file_name"])
            tar.add(caption, sample["file_name"].replace(".mp4", ".txt"))
    for name, path in (("tar", tmp_path / "tars" / "0.tar"), ("folder", shape_clips)):
        lora_main([*smoke, f"data.path={path}", "train.steps=3", f"run.dir={tmp_path / name}"])
    assert trajectory(tmp_path / "tar") == trajectory(tmp_path / "folder")


def test_a_run_makes_its_prior_and_trains_on_it(
    lora_main: Main, smoke: list[str], shape_clips: Path, tmp_path: Path
) -> None:
    prior = {
        "path": str(tmp_path / "prior"),
        "caption": "a disc",
        "generate": 2,
        "loss_weight": 0.5,
    }
    sources = json.dumps([{"path": str(shape_clips)}, prior])
    quick = ["validation.inference_steps=1", "train.steps=4", "train.batch_size=2"]
    lora_main([*smoke, "data.path=", f"data.sources={sources}", *quick, f"run.dir={tmp_path}/run"])
    file_names = sorted(path.name for path in (tmp_path / "prior").iterdir())
    assert file_names == ["prior_000000.mp4", "prior_000001.mp4"]
    assert len(TensorCache(tmp_path / "cache" / "videos")) == 7
