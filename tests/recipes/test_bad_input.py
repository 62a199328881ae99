"""Bad input: one clear message that names file and remedy, all offenders at once, and nothing damaged."""

import errno
import fcntl
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from broken_clips import zero_the_last_packets

from dit_lora.data.cache.cache import TensorCache
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.errors import DitLoraError
from dit_lora.training.session.run_lock import LOCK_FILE, LockHolder

Main = Callable[[list[str]], None]


@pytest.fixture
def refused(lora_main: Main, smoke: list[str], tmp_path: Path) -> Callable[..., str]:
    """Run the smoke recipe with overrides and return the message it is refused with."""

    def run(*overrides: str) -> str:
        with pytest.raises(DitLoraError) as error:
            lora_main([*smoke, f"run.dir={tmp_path / 'run'}", *overrides])
        assert error.value.exit_code == 2
        return str(error.value)

    return run


@pytest.fixture
def clips(shape_clips: Path, tmp_path: Path) -> Path:
    """A copy of the clips, to damage."""
    return Path(shutil.copytree(shape_clips, tmp_path / "clips"))


def test_bad_videos_are_all_listed_and_good_ones_stay_cached(
    refused: Callable[..., str], lora_main: Main, smoke: list[str], clips: Path, tmp_path: Path
) -> None:
    files = sorted(clips.glob("*.mp4"))
    files[0].write_bytes(b"not a video")
    write_shapes(tmp_path / "short", clips=1, frames=5, height=64, width=96, fps=8)
    shutil.copy(next((tmp_path / "short").glob("*.mp4")), files[1])
    message = refused(f"data.path={clips}")
    assert f"{files[0]}: not_media: " in message
    assert f"{files[1]}: too short: 9 frames at 8 fps are needed, and it has" in message
    assert files[2].name not in message


@pytest.mark.usefixtures("nothing_encoded")
def test_a_video_that_breaks_off_is_found_by_decoding(
    refused: Callable[..., str], clips: Path, tmp_path: Path
) -> None:
    """Its header promises all frames; the other clips are encoded and stay."""
    path = sorted(clips.glob("*.mp4"))[0]
    zero_the_last_packets(path)
    message = refused(f"data.path={clips}")
    assert message.startswith("these clips cannot be used; all others are cached")
    assert str(path) in message
    assert len(TensorCache(tmp_path / "cache" / "videos")) == 4


def test_an_empty_caption_and_a_missing_video(refused: Callable[..., str], clips: Path) -> None:
    lines = [json.loads(line) for line in (clips / "metadata.jsonl").read_text().splitlines()]
    lines[0]["text"] = ""
    lines[1]["file_name"] = "gone.mp4"
    (clips / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    message = refused(f"data.path={clips}")
    assert f"{lines[0]['file_name']}: its caption is empty" in message
    assert "gone.mp4: no such file" in message


def test_zero_clips(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    assert "no clips in" in refused(f"data.path={tmp_path / 'nothing'}")


def test_an_unknown_key_and_a_wrong_type(refused: Callable[..., str]) -> None:
    message = refused("train.step=3", "train.batch_size=two")
    assert "train.step: unknown key; did you mean train.steps?" in message
    assert "train.batch_size" in message
    assert "got 'two'" in message


def test_guidance_below_0(refused: Callable[..., str]) -> None:
    message = refused("validation.guidance_scale=-0.5")
    assert "validation.guidance_scale" in message
    assert "greater than or equal to 0; got -0.5" in message


def test_a_missing_checkpoint(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "./nowhere does not exist" in refused("model.path=./nowhere")
    (tmp_path / "empty").mkdir()
    assert "is not a Diffusers checkpoint: it has no model_index.json" in refused(f"model.path={tmp_path / 'empty'}")


def test_a_hub_id_that_cannot_be_had(refused: Callable[..., str]) -> None:
    message = refused("model.path=nobody/nothing-here")
    assert "no local folder nobody/nothing-here, and it cannot be downloaded" in message


def test_a_checkpoint_of_another_family(
    refused: Callable[..., str], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(tiny_checkpoints["cogvideox-2b"], tmp_path / "other")
    index = json.loads((checkpoint / "model_index.json").read_text())
    index["_class_name"] = "SanaPipeline"
    (checkpoint / "model_index.json").write_text(json.dumps(index))
    message = refused(f"model.path={checkpoint}")
    assert "is a SanaPipeline checkpoint; family cogvideox trains CogVideoXPipeline" in message
    assert "no family 'sana3'; model.family is one of anima, chroma, cogvideox" in refused("model.family=sana3")


@pytest.mark.parametrize(
    ("component", "change", "words"),
    [
        (
            "scheduler/scheduler_config.json",
            {"prediction_type": "epsilon"},
            "prediction_type=epsilon",
        ),
        ("transformer/config.json", {"in_channels": 8}, "in_channels must be 4; got 8"),
    ],
)
def test_a_checkpoint_that_contradicts_the_family(  # type: ignore[no-untyped-def]
    refused, tiny_checkpoints, tmp_path, component: str, change: dict, words: str
) -> None:
    checkpoint = shutil.copytree(tiny_checkpoints["cogvideox-2b"], tmp_path / "other")
    config = json.loads((checkpoint / component).read_text())
    (checkpoint / component).write_text(json.dumps({**config, **change}))
    assert words in refused(f"model.path={checkpoint}")


@pytest.mark.usefixtures("nothing_encoded")
@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("vae/config.json", None, "it has no vae/config.json"),
        ("vae/diffusion_pytorch_model.safetensors", None, "vae: no .safetensors file"),
        ("transformer/diffusion_pytorch_model.safetensors", 1000, "transformer/diffusion_pytorch"),
        ("text_encoder/model.safetensors", 1000, "text_encoder/model.safetensors"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_before_any_encoding(  # type: ignore[no-untyped-def]
    refused, tiny_checkpoints, tmp_path: Path, file: str, damage: int | None, words: str
) -> None:
    damaged = Path(shutil.copytree(tiny_checkpoints["cogvideox-2b"], tmp_path / "other"))
    data = (damaged / file).read_bytes()
    (damaged / file).unlink()
    if damage:
        (damaged / file).write_bytes(data[:damage])
    assert words in refused(f"model.path={damaged}")
    assert not (tmp_path / "cache").exists()


def test_a_run_dir_that_is_a_file_or_not_ours(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "cannot write run.dir" in refused(f"run.dir={tmp_path / 'file'}")
    assert "cannot write run.dir" in refused(f"run.dir={tmp_path / 'file' / 'below'}")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("x")
    assert "is not empty and is not a run" in refused(f"run.dir={tmp_path / 'home'}")


def test_a_target_and_a_group_that_match_nothing(refused: Callable[..., str]) -> None:
    assert "match no linear layer of CogVideoXTransformer3DModel: to_qq" in refused("lora.targets=[to_qq]")
    message = refused("optim.groups.connector={lr: 1e-5, modules: [nothing.*]}")
    assert "these parameter groups match nothing: connector" in message
    message = refused("optim.groups.connector={lr: 1e-5, modules: [proj_out.*, x.*]}")
    assert "match nothing: connector (x.*)" in message


def test_a_resume_path_that_is_not_there_or_anothers(
    refused: Callable[..., str], lora_main: Main, smoke: list[str], tmp_path: Path
) -> None:
    assert "train.resume: nowhere does not exist" in refused("train.resume=nowhere")
    run = tmp_path / "first"
    lora_main([*smoke, "train.steps=2", f"run.dir={run}"])
    path = run / "checkpoints" / "step_000002"
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    message = refused(f"train.resume={path}", "lora.rank=8", "optim.clip=0.5")
    assert "is beyond train.steps=1" in refused(f"train.resume={path}", "train.steps=1")
    assert "belongs to another recipe" in message
    assert "lora.rank: 4 in the checkpoint, 8 in the recipe" in message
    assert "optim.clip: 1.0 in the checkpoint, 0.5 in the recipe" in message
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_run_folder_in_use_is_not_overwritten(
    refused: Callable[..., str], lora_main: Main, smoke: list[str], tmp_path: Path
) -> None:
    lora_main([*smoke, "train.steps=2", f"run.dir={tmp_path / 'run'}"])
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    message = refused("train.steps=3")
    assert "already has a run; continue it with train.resume=auto" in message
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.usefixtures("nothing_encoded")
def test_a_run_folder_that_another_process_trains_in(refused: Callable[..., str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with (run / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        json.dump(asdict(replace(LockHolder.from_this_process(), host="node7", pid=4242)), lock)
        lock.flush()
        before = (run / LOCK_FILE).read_bytes()
        message = refused("train.resume=auto")
    assert f"run.dir {run} is in use by process 4242 on node7" in message
    assert (run / LOCK_FILE).read_bytes() == before
    assert [path.name for path in run.iterdir()] == [LOCK_FILE]
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_while_saving(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dit_lora.training.checkpoints import files as checkpoint

    write = checkpoint._write_synced

    def fill(path: Path, data: bytes) -> None:
        if "step_000002" not in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(checkpoint, "_write_synced", fill)
    message = refused("train.steps=6", "train.save_every=2")
    assert "cannot save the checkpoint of step 4" in message
    assert "step 5 cannot be saved either; train.resume=auto continues from " in message
    assert "No space left on device" in message
    names = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert names == ["step_000002"]


def test_a_tracker_that_is_not_installed(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate would leave it out and say nothing."""
    installed = metadata.distributions

    def without_trackio(**wanted: Any) -> Iterable[metadata.Distribution]:
        return () if wanted.get("name") == "trackio" else installed(**wanted)

    monkeypatch.setattr(metadata, "distributions", without_trackio)
    message = refused("run.trackers=[tensorboard, trackio]")
    assert "run.trackers: trackio not installed; pip install 'dit-lora[trackio]'" in message


def test_a_resolution_that_does_not_fit(refused: Callable[..., str]) -> None:
    message = refused("data.height=50", "data.frames=12")
    assert "data.height must be a multiple of 16; got 50, nearest 48 and 64" in message
    assert "data.frames must be 8n + 1; got 12, nearest 9 and 17" in message


@pytest.fixture
def everyone_out(shape_clips: Path, tmp_path: Path) -> Path:
    """A quarantine list with every clip in it."""
    record = {"from_epoch": 0, "to_epoch": None, "step": 1, "cause": "data", "reason": "x"}
    lines = [json.dumps({"sample_id": p.name, **record}) for p in shape_clips.glob("*.mp4")]
    path = tmp_path / "everyone.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_quarantine_list_that_is_missing_or_is_none(refused: Callable[..., str], tmp_path: Path) -> None:
    assert refused("guard.quarantine=nowhere") == "guard.quarantine: nowhere does not exist"
    (tmp_path / "list.txt").write_text("a.mp4\n")
    message = refused(f"guard.quarantine={tmp_path / 'list.txt'}")
    assert f"{tmp_path / 'list.txt'} is not a quarantine list" in message


def test_a_quarantine_list_is_read_before_anything_is_written(refused: Callable[..., str], tmp_path: Path) -> None:
    refused("guard.quarantine=nowhere")
    assert not (tmp_path / "run").exists()


def test_a_quarantine_list_that_leaves_no_sample(refused: Callable[..., str], everyone_out: Path) -> None:
    assert "leaves out all 5 samples" in refused(f"guard.quarantine={everyone_out}")


def test_from_the_shell_it_is_a_message_and_exit_code_2(  # type: ignore[no-untyped-def]
    launch, smoke: list[str], tmp_path: Path
) -> None:
    result = launch([*smoke, "data.path=nowhere", f"run.dir={tmp_path / 'run'}"])
    assert result.returncode == 2
    assert "error: data.path: the folder nowhere does not exist" in result.stderr
    assert "Traceback" not in result.stderr
