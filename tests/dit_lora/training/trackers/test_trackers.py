"""What each tracker holds after a run that stopped and went on, read back from its own files."""

import errno
import json
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import wandb
from accelerate import PartialState
from PIL import Image
from runs import lines
from wandb_files import history, wandb_starts

from dit_lora.data.media.video import write_sample, write_video
from dit_lora.errors import DitLoraError
from dit_lora.training.trackers.trackers import (
    Trackers,
    find_login_problem,
    flatten,
    require_trackers,
)

ALL = ("tensorboard", "wandb", "trackio")
TOKEN = "hf_" + "x" * 20
PROMPTS = [f"a square {TOKEN} of /home/somebody/red.mp4", "a circle"]
EVENT = {
    "step": 3,
    "micro_step": 0,
    "rank": 0,
    "kind": "non_finite_loss",
    "sample_ids": ["horse.mp4"],
    "verdict": {"cause": "data", "module": "proj_out", "words": "in /home/somebody/cache/5e0c"},
    "action": "quarantine",
    "seconds": 0.5,
}
ANSWERS = [{"prompt": "What moves?", "media": "/home/somebody/a.mp4", "answer": "A | square"}]


class World:
    """Trackers of a run's folder, started as often as asked, and what they said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def started(self, names: tuple[str, ...] = ALL, step: int = 0, **config: Any) -> Trackers:
        PartialState(cpu=True)  # a run's Accelerator has made it, and Accelerate's trackers ask it
        trackers = Trackers(self.folder, names, self.said.append)
        trackers.start_trackers(config, step)
        return trackers

    def event(self, trackers: Trackers) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(EVENT) + "\n")
        trackers.log_event(EVENT)


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """W&B logs to the run's folder, Trackio (which reads it when imported) to a separate folder."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DATA_DIR", str(home))
        patch.setenv("TRACKIO_DIR", str(home / "trackio"))
        yield home


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, offline: Path) -> World:
    """Steps 1 to 4 with samples and an event in step 3, then again from step 3, after a checkpoint of step 2."""
    new_world = World(tmp_path_factory.mktemp("runs") / "kitten")
    new_world.folder.mkdir()
    config = {
        "model": {"path": "/home/somebody/models/tiny"},
        "optim": {"betas": [0.9, 0.95], "groups": {"adapter": {"lr": 1e-3, "clip": None}}},
    }
    first_run = new_world.started(**config)
    for step in (1, 2, 3, 4):
        first_run.log_scalars({"loss": 1 / step, "lr/adapter": 1e-3}, step)
    samples = new_world.folder / "samples" / "step_000003"
    frames = torch.randint(0, 256, (5, 64, 480, 3), dtype=torch.uint8)
    write_video(samples / "prompt_00.mp4", frames, 8)
    write_sample(samples / "prompt_01", frames[:1, :32, :48], None)
    (samples / "answers.json").write_text(json.dumps(ANSWERS))
    first_run.log_samples(3, PROMPTS)
    new_world.event(first_run)
    first_run.finish(failed=True)
    second = new_world.started(step=2, **config)
    for step in (3, 4):
        second.log_scalars({"loss": 10 / step, "lr/adapter": 1e-3}, step)
    second.finish(failed=False)
    assert new_world.said == []
    wandb.teardown()  # its service has written everything when it is gone
    return new_world


def test_tensorboard_has_each_step_once(world: World) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(world.folder / "dit-lora"), size_guidance={"images": 0})
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(10 / 3)), (4, 2.5)]
    names = {path.parent.name for path in world.folder.rglob("*tfevents*")}
    assert names == {"dit-lora"}  # one run, not one more for each start


def test_tensorboard_keeps_an_event_of_a_step_that_is_done_again(world: World) -> None:
    """By the reader of TensorBoard's pages, which purges what the resumed run does again."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    events = EventAccumulator(str(world.folder / "dit-lora"))
    events.Reload()
    assert [event.step for event in events.Tensors("loss")] == [1, 2, 3, 4]
    (text,) = events.Tensors("guard/table/text_summary")
    assert text.step == 3
    assert b"| 3 | non_finite_loss | data | proj_out | horse.mp4 |" in text.tensor_proto.string_val[0]


def test_tensorboards_animation_has_all_frames_in_a_small_size(tmp_path: Path) -> None:
    """As a GIF: TensorBoard's add_video needs moviepy and an FFmpeg."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    world = World(tmp_path)
    samples = tmp_path / "samples" / "step_000007"
    frames = torch.zeros(5, 64, 480, 3, dtype=torch.uint8)
    for number in range(5):
        frames[number, :, 96 * number : 96 * (number + 1), 0] = 255
    write_video(samples / "prompt_00.mp4", frames, 8)
    write_sample(samples / "prompt_01", frames[:1, :32, :48], None)
    trackers = world.started(("tensorboard",))
    trackers.log_samples(7, PROMPTS)
    trackers.finish(failed=False)
    events = EventAccumulator(str(tmp_path / "dit-lora"))
    events.Reload()
    (video,), (image,) = events.Images("samples/prompt_00"), events.Images("samples/prompt_01")
    (tmp_path / "a.gif").write_bytes(video.encoded_image_string)
    with Image.open(tmp_path / "a.gif") as gif:
        assert (gif.n_frames, gif.size, gif.info["duration"]) == (
            5,
            (320, 43),
            120,
        )
        gif.seek(3)
        red = np.asarray(gif.convert("RGB"))[20, :, 0]
        assert red[64 * 3 + 32] > 200
        assert red[64 * 1 + 32] < 50
    assert (video.step, image.step, image.width, image.height) == (7, 7, 48, 32)
    description = events.SummaryMetadata("samples/prompt_01").summary_description
    assert description == "a circle"


def test_tensorboard_lists_the_recipe_flat(world: World) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(world.folder / "dit-lora"))
    events.Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["optim.groups.adapter.lr"].number_value == 1e-3
    assert hparams["optim.betas"].string_value == "[0.9, 0.95]"
    assert hparams["model.path"].string_value == "tiny"


def test_wandb_goes_on_with_its_run_and_plots_over_the_runs_own_steps(world: World) -> None:
    start, second = wandb_starts(world.folder)
    runs = [next(r.run for r in records if r.HasField("run")) for records in (start, second)]
    assert runs[0].run_id == runs[1].run_id
    assert [run.display_name for run in runs] == ["kitten", "kitten"]
    losses = [[(row["step"], row["loss"]) for row in history(records) if "loss" in row] for records in (start, second)]
    assert losses == [[(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)], [(3, 10 / 3), (4, 2.5)]]
    metric = next(r.metric for r in start if r.HasField("metric") and r.metric.glob_name == "*")
    assert metric.step_metric == "step"
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["optim"]["groups"]["adapter"]["lr"] == 1e-3
    codes = [next(r.exit.exit_code for r in records if r.HasField("exit")) for records in (start, second)]
    assert codes == [1, 0]


def test_wandb_has_videos_images_answers_and_events(world: World) -> None:
    start, second = wandb_starts(world.folder)
    rows = history(start)
    sample_row = next(row for row in rows if "samples/prompt_00._type" in row)
    assert (sample_row["samples/prompt_00._type"], sample_row["samples/prompt_01._type"]) == (
        "video-file",
        "image-file",
    )
    assert (sample_row["step"], sample_row["samples/prompt_01.caption"]) == (3, "a circle")
    (alert,) = [record.alert for record in start if record.HasField("alert")]
    assert (alert.title, alert.level) == ("guard: non_finite_loss", "WARN")
    tables = [json.loads(path.read_text()) for path in world.folder.rglob("*.table.json")]
    assert ["What moves?", "a.mp4", "A | square"] in [row for table in tables for row in table["data"]]
    # The whole list of events is at the end of each start, the resumed one too.
    row = [3, "non_finite_loss", "data", "proj_out", "horse.mp4", "quarantine", "in 5e0c"]
    assert [table["data"] for table in tables].count([row]) == 2
    assert any("guard/table._type" in entry for entry in history(second))


def test_trackio_goes_on_with_its_run(world: World, offline: Path) -> None:
    run_id = json.loads((world.folder / "trackers.json").read_text())["id"]
    with sqlite3.connect(offline / "trackio" / "dit-lora.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        run_rows = [(step, json.loads(text)) for name, step, text in rows if name == f"kitten-{run_id}"]
        alerts = database.execute("select title, text, step, level from alerts").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    losses = [(step, values["loss"]) for step, values in run_rows if "loss" in values]
    assert losses == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25), (3, 10 / 3), (4, 2.5)]
    sample_row = next(values for _, values in run_rows if "samples/prompt_00" in values)
    assert sample_row["samples/prompt_00"]["_type"] == "trackio.video"
    assert sample_row["samples/prompt_01"]["_type"] == "trackio.image"
    media = offline / "trackio" / "media" / sample_row["samples/prompt_00"]["file_path"]
    original = world.folder / "samples" / "step_000003" / "prompt_00.mp4"
    assert media.read_bytes() == original.read_bytes()
    assert any("samples/answers" in values for _, values in run_rows)
    assert ("guard: non_finite_loss", "step 3: in 5e0c (quarantine)", 3, "warn") in alerts
    assert json.loads(config)["optim.groups.adapter.lr"] == 1e-3


def test_nothing_that_is_logged_names_a_machine_or_a_token(world: World, offline: Path) -> None:
    files = [
        *(world.folder / "dit-lora").iterdir(),
        *world.folder.glob("wandb/*/files/**/*.*"),
        *(offline / "trackio").glob("*.db*"),
    ]
    assert len(files) > 8
    for path in files:
        data = path.read_bytes()
        assert TOKEN.encode() not in data, path
        assert b"/home/somebody" not in data, path
        assert str(world.folder.parent).encode() not in data, path
    for records in wandb_starts(world.folder):
        run = next(record.run for record in records if record.HasField("run"))
        assert run.host == ""
        assert not any(record.HasField("output_raw") for record in records)
        kinds = ("run", "history", "alert", "summary", "environment", "telemetry", "exit")
        for record in records:
            if record.WhichOneof("record_type") in kinds:
                text = str(record)
                assert "/home/somebody" not in text
                assert TOKEN not in text
                assert str(world.folder.parent) not in text
                assert sys.executable not in text


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its service killed, its disk full: neither ends a run, and closing does not either."""
    from torch.utils.tensorboard import SummaryWriter

    world = World(tmp_path)
    trackers = world.started(("wandb", "tensorboard"))
    for child in psutil.Process().children(recursive=True):
        if child.name().startswith("wandb"):
            child.kill()
            child.wait()
    for step in range(1, 1000):  # what the socket still takes is no error
        trackers.log_scalars({"loss": 1.0}, step)
    assert len(world.said) == 1
    assert "warning: run.trackers: wandb is not used any more: " in world.said[0]

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "add_scalar", full)
        trackers.log_scalars({"loss": 1.0}, 2)
    assert "tensorboard is not used any more: OSError: [Errno 28]" in world.said[1]
    trackers.log_scalars({"loss": 1.0}, 3)
    trackers.finish(failed=False)
    assert len(world.said) == 2
    with suppress(OSError):
        wandb.teardown()  # else it says at the tests' end that its service is gone
    events = (tmp_path / "dit-lora").iterdir()
    assert all(path.stat().st_size > 20_000 for path in events)  # the other has all steps


@pytest.mark.thorough
def test_wandb_that_cannot_be_reached_logs_to_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb.teardown()  # its service keeps the environment that it began with
    unreachable = {
        "MODE": "online",
        "API_KEY": "0" * 40,
        "BASE_URL": "http://127.0.0.1:9",
        "INIT_TIMEOUT": "0.5",
    }
    for name, value in unreachable.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    world = World(tmp_path)
    trackers = world.started(("wandb",))
    trackers.log_scalars({"loss": 0.5}, 1)
    trackers.finish(failed=False)
    wandb.teardown()
    (message,) = world.said
    assert message.startswith("warning: wandb: CommError: ")
    assert message.endswith("; logging to the run's folder instead")
    (records,) = [start for start in wandb_starts(tmp_path) if history(start)]
    assert [(row["step"], row["loss"]) for row in history(records)] == [(1, 0.5)]


def test_wandb_without_a_key_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal it would ask in the middle of the run; without one it raises."""
    assert find_login_problem(ALL) is None  # offline, as these tests are
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    problem = find_login_problem(("wandb",))
    wandb.teardown()
    assert isinstance(problem, DitLoraError)
    assert "run `wandb login`, or log to the run's folder with WANDB_MODE=offline" in str(problem)
    assert find_login_problem(("tensorboard", "trackio")) is None


def test_a_folder_by_the_name_of_a_tracker_is_not_the_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases leaves a folder `wandb` where it ran, which Python can import."""
    require_trackers(ALL)
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()
    with pytest.raises(DitLoraError, match=r"wandb not installed; pip install 'dit-lora\[wandb\]'"):
        require_trackers(("wandb",))


def test_a_run_tells_its_trackers_its_steps_samples_and_losses(
    lora_main: Callable[[list[str]], None], smoke: list[str], tmp_path: Path
) -> None:
    """From the recipe to the file, and on in the same place after a resume."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    common = [
        *smoke,
        f"run.dir={run}",
        "run.trackers=[tensorboard]",
        "validation.prompts=[a square]",
        "validation.eval_draws=1",
        "validation.inference_steps=1",
        "train.save_every=2",
    ]
    lora_main([*common, "train.steps=2"])
    lora_main([*common, "train.steps=3", "train.resume=auto"])
    events = EventAccumulator(str(run / "dit-lora"))
    events.Reload()
    metrics = lines(run, "metrics.jsonl")
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    for name in ("loss", "grad_norm", "seconds", "peak_gib", "samples"):
        logged_values = [event.value for event in events.Scalars(name)]
        assert logged_values == pytest.approx([line[name] for line in metrics]), name
    rates = [event.value for event in events.Scalars("samples_per_second")]
    assert rates == pytest.approx([2 / line["seconds"] for line in metrics])
    assert [event.value for event in events.Scalars("lr/adapter")] == pytest.approx([1e-3] * 3)
    eval_losses = {event.step: event.value for event in events.Scalars("eval_loss")}
    journal_losses = {row["step"]: row["eval_loss"] for row in lines(run, "eval_loss.jsonl")}
    assert eval_losses == pytest.approx(journal_losses)
    assert eval_losses.keys() == {0, 2, 3}
    assert [event.step for event in events.Images("samples/prompt_00")] == [0, 2, 3]


def test_nested_values_are_flattened_as_a_recipes_overrides_are() -> None:
    values = {"a": {"b": {"c": 1}, "d": None}, "e": [1, 2], "f": {}}
    assert flatten(values) == {"a.b.c": 1, "a.d": None, "e": [1, 2], "f": {}}
