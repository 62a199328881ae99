"""Working with a run: forms become ordinary commands, which are shown, queued, stopped and followed."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from studio_client import ORIGIN, StudioClient

from dit_lora.adapters.marked_save import find_best_save, mark_step_as_best
from dit_lora.environment.operating_system import list_gpus
from dit_lora.errors import DitLoraError
from dit_lora.studio import jobs
from dit_lora.studio.app import build_app, list_pages
from dit_lora.studio.jobs import JobQueue
from dit_lora.studio.library import RunLibrary
from dit_lora.training.checkpoints.files import prune_checkpoints

COMMAND = """
import os, pathlib, signal, sys, time
from dit_lora.studio import jobs
arguments = sys.argv[1:]
print("started", arguments[0], flush=True)
if arguments[0] == "sample":
    out = pathlib.Path(arguments[-1].removeprefix("--out="))
    out.mkdir(parents=True)
    (out / "seed_0_a-cat_123456.png").write_bytes(b"a picture")
    (out / "notes.txt").write_text("secret")
    (out / "linked.png").symlink_to("/etc/hostname")
if arguments[0] == "train":
    # Installed explicitly, as a training does: a process in the background may ignore Ctrl-C from its start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("ready", flush=True)
    time.sleep(60)
sys.exit(3 if arguments[0] == "export" else 0)
"""
"""Stands in for the commands, of which it does nothing but leave files."""


@pytest.fixture
def folder(run_dir: Path) -> Path:
    """An interrupted run with the saves of two steps."""
    for step in (10, 20):
        save = run_dir / "checkpoints" / f"step_{step:06d}"
        save.mkdir(parents=True)
        (save / "pytorch_lora_weights.safetensors").touch()
        (save / "trainable.safetensors").touch()
    return run_dir


@pytest.fixture
def client(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudioClient:
    script = tmp_path / "command.py"
    script.write_text(COMMAND.replace("from dit_lora.studio import jobs\n", ""))
    start = subprocess.Popen

    def start_script(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        assert command[:3] == [sys.executable, "-m", "dit_lora"]
        return start([sys.executable, str(script), *command[3:]], **options)

    monkeypatch.setattr(jobs.subprocess, "Popen", start_script)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return StudioClient(build_app(list_pages(RunLibrary([folder]))))


def wait_for(client: StudioClient, text: str) -> str:
    deadline = time.monotonic() + 30
    while text not in (page := client.get("/jobs").text):
        assert time.monotonic() < deadline, page
        time.sleep(0.02)
    return page


def post_form(client: StudioClient, path: str, **fields: str) -> Any:
    data = {"token": client.keys.page_token, **fields}
    return client.post(path, data=data, headers={"Origin": ORIGIN})


def get_choice(client: StudioClient, work: str, step: int) -> str:
    return client.get(work).text.split(f'<option value="{step}@')[1].split('"')[0]


def test_a_save_is_sampled_again(client: StudioClient, folder: Path, run_path: str) -> None:
    work = f"{run_path}work"
    recipe = folder / "config.yaml"
    recipe.write_text(recipe.read_text().replace("validation:\n", "validation:\n  inference_steps: 12\n"))
    page = client.get(work).text
    assert '<input name="inference_steps" inputmode="numeric" value="12" required>' in page
    assert "step 20, eval loss 2" in page
    assert "Continue training from the last save" in page
    save = f"10@{get_choice(client, work, 10)}"
    good = {"save": save, "prompt": "-a cat's <hat>", "strengths": "0, 0.5,1", "seed": "7", "inference_steps": "20"}
    for changes in (
        {"prompt": " "},
        {"strengths": "1,1"},
        {"strengths": "nan"},
        {"seed": "-1"},
        {"seed": "9" * 5000},
        {"inference_steps": "1001"},
        {"save": "../../x@1"},
        {"save": "10"},
    ):
        answer = post_form(client, f"{work}/sample", **good | changes)
        assert (answer.status_code, len(answer.text.splitlines())) == (422, 1), changes
    assert "None yet" in client.get("/jobs").text
    answer = post_form(client, f"{work}/sample", **good)
    assert (answer.status_code, answer.headers["location"]) == (303, "/jobs")
    page = wait_for(client, ">done</span>")
    assert f"dit-lora sample &#39;{folder}/checkpoints/step_000010&#39; &#39;--prompt=-a cat&#39;" in page
    assert "s &lt;hat&gt;&#39; --strengths=0,0.5,1 --seed=7 --inference-steps=20" in page
    (picture,) = [path for path in re.findall('src="([^"]*)"', page) if "/studio/" in path]
    assert client.get(picture).content == b"a picture"
    for name in ("notes.txt", "linked.png", "../../config.yaml"):
        assert client.get(picture.replace("seed_0_a-cat_123456.png", name)).status_code == 404, name


def test_a_save_that_was_replaced_meanwhile_is_refused_and_both_are_shown(
    client: StudioClient, folder: Path, run_path: str
) -> None:
    work = f"{run_path}work"
    seen = get_choice(client, work, 10)
    os.utime(folder / "checkpoints" / "step_000010", (1, 1))
    now = get_choice(client, work, 10)
    answer = post_form(client, f"{work}/export", save=f"10@{seen}", form="diffusers")
    assert answer.status_code == 409
    assert f"it was written {seen}, and now {now}" in answer.text
    version = client.get(work).text.split('name="version" value="')[1].split('"')[0]
    assert version == "interrupted at step 20"
    (folder / "status.json").write_text(json.dumps({"state": "failed"}))
    answer = post_form(client, f"{work}/continue", version=version)
    assert answer.status_code == 409
    assert "was interrupted at step 20, and is ended with an error at step 20" in answer.text
    assert "None yet" in client.get("/jobs").text


def test_an_export_says_how_it_ended_and_is_written_to_no_other_place(
    client: StudioClient, folder: Path, run_path: str, tmp_path: Path
) -> None:
    work = f"{run_path}work"
    fields = {"save": f"20@{get_choice(client, work, 20)}", "form": "comfyui"}
    assert post_form(client, f"{work}/export", **fields | {"form": "pickle"}).status_code == 422
    (folder / "exports").symlink_to(tmp_path)
    assert post_form(client, f"{work}/export", **fields).status_code == 422
    (folder / "exports").unlink()
    assert post_form(client, f"{work}/export", **fields).status_code == 303
    page = wait_for(client, "exit code 3")
    assert "--to comfyui --out" in page
    assert "started export" in page


def test_trainings_are_queued_stopped_and_removed(client: StudioClient, run_path: str) -> None:
    fields = {"version": "interrupted at step 20"}
    for _ in range(3):
        assert post_form(client, f"{run_path}work/continue", **fields).status_code == 303
    page = wait_for(client, "ready")
    assert [page.count(f">{state}</span>") for state in ("running", "waiting")] == [1, 2]
    assert post_form(client, "/jobs/stop", job="2").status_code == 303
    assert post_form(client, "/jobs/stop", job="1").status_code == 303
    page = wait_for(client, "started train")
    assert post_form(client, "/jobs/stop", job="1").status_code == 422
    assert post_form(client, "/jobs/stop", job="9").status_code == 422
    deadline = time.monotonic() + 30
    while client.get("/jobs").text.count(">running</span>") == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    page = client.get("/jobs").text
    assert [page.count(f">{state}</span>") for state in ("running", "stopped")] == [1, 2]
    assert post_form(client, "/jobs/stop", job="3").status_code == 303


def test_what_a_chat_model_or_a_whole_model_cannot_do_is_not_offered(
    client: StudioClient, folder: Path, run_path: str
) -> None:
    (folder / "config.yaml").write_text("model: {family: videochat2}\n")
    page = client.get(f"{run_path}work").text
    assert "Sample again" not in page
    assert "Export" not in page.split("</nav>")[1]
    shutil.rmtree(folder / "checkpoints")
    assert "has saved no adapter yet" in client.get(f"{run_path}work").text


def test_a_save_is_marked_as_best_and_what_was_measured_stays(
    client: StudioClient, folder: Path, run_path: str
) -> None:
    work, measured = f"{run_path}work", '[{"checkpoint": "step_000020", "step": 20, "eval_loss": 2.0}]'
    (folder / "checkpoints" / "best.json").write_text(measured)
    assert find_best_save(folder).name == "step_000020"
    choice = f"10@{get_choice(client, work, 10)}"
    assert post_form(client, f"{work}/mark", save=choice, marked="None").status_code == 303
    page = client.get(work).text
    assert ", marked as best</option>" in page
    assert '<td class="inline">step 10 <b>best</b></td>' in page
    assert find_best_save(folder).name == "step_000010"
    assert (folder / "checkpoints" / "best.json").read_text() == measured
    # By a page that does not know of the mark.
    assert post_form(client, f"{work}/mark", save=choice, marked="None").status_code == 409
    # The run deletes other saves only.
    prune_checkpoints(folder, 20, keep=1, keep_adapters=0)
    assert (folder / "checkpoints" / "step_000010" / "trainable.safetensors").is_file()
    assert post_form(client, f"{work}/mark", save=choice, marked="10", action="remove").status_code == 303
    with pytest.raises(DitLoraError, match="step 20, was deleted"):
        find_best_save(folder)
    with pytest.raises(DitLoraError, match="has no save with an adapter"):
        mark_step_as_best(folder, 30)
    (folder / "checkpoints" / "best.json").unlink()
    with pytest.raises(DitLoraError, match="--mark-best STEP"):
        find_best_save(folder)


def test_each_gpu_has_one_command_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    script = (
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        "import os, signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(float(sys.argv[1]))"
    )

    def start_script(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        return start([sys.executable, "-c", script, command[-1]], **options)

    monkeypatch.setattr(jobs.subprocess, "Popen", start_script)
    queue = JobQueue(lambda: ["GPU-a", "GPU-b"])
    added = [queue.add(["train", seconds], "", needs_gpu=True) for seconds in ("60", "60", "0", "0")]
    deadline = time.monotonic() + 30
    while not all(job.state == "running" and job.output for job in added[:2]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert {added[0].gpu, added[1].gpu} == {"GPU-a", "GPU-b"}
    assert [job.state for job in added[2:]] == ["waiting"] * 2
    queue.stop(added[0].job_id)
    while added[3].state != "done" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [job.state for job in added] == ["stopped", "running", "done", "done"]
    assert added[2].gpu == added[3].gpu == added[3].output == added[0].gpu
    queue.stop(added[1].job_id)


def test_the_gpus_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-x")
    assert list_gpus() == ["2", "GPU-x"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert list_gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU-1; echo GPU-2\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == ["GPU-1", "GPU-2"]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert list_gpus() == []
    tool.unlink()
    assert list_gpus() == []
