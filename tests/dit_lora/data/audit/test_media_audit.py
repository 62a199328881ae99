"""Every file ends in a verdict, whatever it does to the decoder, and a second audit decodes only what is new."""

import io
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.faults.media.encode import FRAMES, HEIGHT, WIDTH, encode, flat, moving
from dit_lora.config.data import DataConfig
from dit_lora.data.audit import runner, workers
from dit_lora.data.audit.finding import AuditedSample
from dit_lora.data.audit.judge import SampleRequirements, collect_frame_findings, collect_media_findings
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.probe import ProbedFile, probe_file
from dit_lora.data.audit.runner import audit_from_stored_measurements, audit_media
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.video import ClipError, read_frames
from dit_lora.data.sources.clips import Clip
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.errors import DitLoraError

ROOT = Path(__file__).parents[4]
DATA = DataConfig(path="clips", frames=9, height=HEIGHT, width=WIDTH, fps=8)


@dataclass(frozen=True)
class Bytes:
    """Media that are in memory."""

    name: str
    data: bytes

    @property
    def location(self) -> str:
        return self.name

    def get_source(self) -> io.BytesIO:
        return io.BytesIO(self.data)

    def get_file_stamp(self) -> tuple[int, ...]:
        return (len(self.data),)

    def exists(self) -> bool:
        return True


class Trap(Bytes):
    """Media on which a worker runs something else: it is done as they are unpickled."""

    def __new__(cls, name: str, act: Callable[..., Any], *arguments: Any) -> "Trap":
        trap = super().__new__(cls)
        object.__setattr__(trap, "act", (act, arguments))
        return trap

    def __init__(self, name: str, act: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(name, name.encode())

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.__dict__["act"]


def rejects(found: ProbedFile, media: Any, data: DataConfig = DATA) -> set[str]:
    findings = collect_media_findings(media, found, SampleRequirements.from_config(data))
    return {finding.code for finding in findings if finding.verdict == "reject"}


def codes(judged: AuditedSample) -> list[str]:
    return [finding.code for finding in judged.findings]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Small sound files, by name."""
    root = tmp_path_factory.mktemp("whole")
    encode(root / "a.mp4", moving("a"))
    encode(root / "fast.mp4", moving("a"), muxing={"movflags": "faststart"})
    encode(root / "a.webm", moving("a"), "libvpx-vp9")
    encode(root / "a.avi", moving("a"), "mpeg4")
    image = Image.fromarray(moving("a", 1)[0])
    for name in ("a.png", "a.jpg", "a.webp"):
        image.save(root / name)
    return {path.name: path.read_bytes() for path in root.iterdir()}


NAMES = ("a.mp4", "fast.mp4", "a.webm", "a.avi", "a.png", "a.jpg", "a.webp")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_cut_anywhere_is_rejected(whole: dict[str, bytes], name: str) -> None:
    data = whole[name]
    # What is behind that is an index or a checksum, which decoders do without.
    max_length = int(len(data) * {"a.avi": 0.8}.get(name, 0.97))
    image = DATA.model_copy(update={"frames": 1, "fps": None})
    recipe = DATA if name.endswith(("mp4", "webm", "avi")) else image
    assert not rejects(probe_file(Bytes(name, data)), Bytes(name, data), recipe)
    for length in range(0, max_length, max_length // 30):
        media = Bytes(name, data[:length])
        reject_codes = rejects(probe_file(media), media, recipe)
        assert reject_codes, length
        # An AVI's headers and the space behind them are longer than its frames here.
        assert length < len(data) / 2 or name == "a.avi" or "truncated" in reject_codes


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_findings_comes_of_damaged_bytes(whole: dict[str, bytes], name: str) -> None:
    chance = random.Random(name)
    for _ in range(40):
        data = bytearray(whole[name])
        for _ in range(chance.choice([1, 1, 8, 40])):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.3:
            start = chance.randrange(len(data))
            data[start : start + 50] = chance.randbytes(chance.randrange(100))
        media = Bytes(name, bytes(data))
        collect_media_findings(media, probe_file(media), SampleRequirements.from_config(DATA))


def test_a_clip_of_one_frame_in_an_hour_is_judged(tmp_path: Path) -> None:
    """Damaged headers promise such things."""
    media = MediaFile(tmp_path / "a.mkv")
    encode(media.path, moving("a", 3), times=[0, 3_600_000, 7_200_000])
    probe_result = probe_file(media)
    assert probe_result.facts["fps"] == pytest.approx(1 / 3600, rel=1e-4)
    assert not rejects(probe_result, media)


def test_a_playlist_is_not_followed(tmp_path: Path, whole: dict[str, bytes]) -> None:
    """FFmpeg would open what a text file names."""
    (tmp_path / "secret.mp4").write_bytes(whole["a.mp4"])
    for text in ("#EXTM3U\n#EXTINF:2,\nsecret.mp4\n", "ffconcat version 1.0\nfile secret.mp4\n"):
        (tmp_path / "list.mp4").write_text(text)
        probe_result = probe_file(MediaFile(tmp_path / "list.mp4"))
        assert [fault.code for fault in probe_result.faults] == ["not_media"]
        assert "frames" not in probe_result.facts


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    (sample,) = audit_media([Clip("pipe.mp4", MediaFile(tmp_path / "pipe.mp4"), "")], None)
    assert codes(sample) == ["missing"]


@pytest.mark.parametrize("fps", [3.0, 7.9, 8.0, 24.0])
def test_too_short_is_what_training_cannot_read(tmp_path: Path, fps: float) -> None:
    media = MediaFile(tmp_path / "a.mkv")
    for count in (1, 2, 5):
        encode(media.path, moving("a", count))
        probe_result = probe_file(media)
        for frames in range(1, 20):
            data = DATA.model_copy(update={"frames": frames, "fps": fps})
            try:
                read_frames(media, frames=frames, height=HEIGHT, width=WIDTH, fps=fps)
                assert "too_short" not in rejects(probe_result, media, data)
            except ClipError:
                assert "too_short" in rejects(probe_result, media, data)


def test_a_crash_or_a_hang_costs_one_file(whole: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(whole["a.mp4"])
    good = MediaFile(tmp_path / "a.mp4")
    media = [good, Trap("abort", os.abort), good, Trap("sleep", time.sleep, 3600), good, good]
    probes = dict(workers.probe_all(iter(enumerate(media)), 1, stall_timeout_s=5))
    messages = {number: probed.faults[0].message for number, probed in sorted(probes.items()) if probed.faults}
    assert messages == {
        1: "the decoder crashed (SIGABRT)",
        3: "the decoder made no progress for 5 s",
    }
    assert len(probes) == 6
    assert all(probes[number].facts["frames"] == FRAMES for number in (0, 2, 4, 5))


def test_a_worker_leaves_ctrl_c_to_the_main_process(whole: dict[str, bytes]) -> None:
    media = [Bytes("a.png", whole["a.png"])] * 2
    probes = workers.probe_all(iter(enumerate(media)), 1)
    next(probes)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid or 0, signal.SIGINT)
    assert not next(probes)[1].faults
    probes.close()
    assert not worker.is_alive()


def test_processes_that_cannot_start_reject_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_run_worker", os._exit)  # with a wrong argument
    with pytest.raises(DitLoraError, match="the audit's processes end when they start"):
        list(workers.probe_all(iter([(0, MediaFile(Path("a.mp4")))]), 1))


def test_ctrl_c_ends_the_workers_and_keeps_what_is_done(whole: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(whole["a.mp4"])
    script = tmp_path / "run.py"
    script.write_text(
        f"""
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background jobs ignore it
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(ROOT)!r}]
if __name__ == "__main__":
    from test_media_audit import *
    from dit_lora.environment import progress_bar
    progress_bar._LINE_INTERVAL_S = 0.0  # tells each file in a pipe too
    folder = Path({str(tmp_path)!r})
    clips = [Clip("a.mp4", MediaFile(folder / "a.mp4"), ""), Clip("b.mp4", Trap("b.mp4", time.sleep, 3600), "")]
    audit_media(clips, None, workers=1, memo=AuditMemo(folder / "memo.jsonl"), show_progress=True)
"""
    )
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, start_new_session=True)
    assert process.stderr is not None
    stderr = b""
    while b"1 of 2" not in stderr:
        stderr += (chunk := os.read(process.stderr.fileno(), 4096))
        assert chunk, stderr
    os.killpg(process.pid, signal.SIGINT)
    stderr += process.stderr.read()  # to the end: no process holds it any more
    assert process.wait(200) == -signal.SIGINT
    assert stderr.count(b"Traceback") == 1  # the main one's, which the command line turns into a word
    assert len((tmp_path / "memo.jsonl").read_text().splitlines()) == 1


@pytest.fixture
def folder(tmp_path: Path, whole: dict[str, bytes]) -> list[Clip]:
    for name in ("b.mp4", "c.mp4", "d.mp4"):
        encode(tmp_path / name, moving(name))
    (tmp_path / "cut.mp4").write_bytes(whole["fast.mp4"][:2000])
    names = ("d.mp4", "cut.mp4", "b.mp4", "c.mp4")
    return [Clip(name, MediaFile(tmp_path / name), "x") for name in names]


def no_decoding(jobs: Any, workers: int) -> Any:
    for _, media in jobs:
        raise AssertionError(f"{media.name} is decoded")
    yield from ()


def test_a_second_audit_decodes_only_what_is_new(
    folder: list[Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, digests = tmp_path / "audit.jsonl", Digests(tmp_path / "digests.json")
    first_samples = audit_media(folder, DATA, memo=AuditMemo(path), digests=digests)
    assert [sample.file for sample in first_samples] == ["d.mp4", "cut.mp4", "b.mp4", "c.mp4"]
    assert [sample.verdict for sample in first_samples] == ["ok", "reject", "ok", "ok"]
    assert first_samples[0].facts["frames"] == FRAMES
    monkeypatch.setattr(runner, "probe_all", no_decoding)
    assert audit_media(folder, DATA, memo=AuditMemo(path), digests=digests) == first_samples
    assert audit_from_stored_measurements(folder, DATA, memo=AuditMemo(path), digests=digests) == first_samples
    longer = DATA.model_copy(update={"frames": 30})
    second_samples = audit_media(folder, longer, memo=AuditMemo(path), digests=digests)
    assert codes(second_samples[0]) == ["too_short"]
    with path.open("a") as stream:
        stream.write('{"key": "1/video/00')  # torn
    assert audit_media(folder, DATA, memo=AuditMemo(path), digests=digests) == first_samples
    folder[2].media.path.write_bytes(b"changed")  # type: ignore[attr-defined]
    assert [
        sample.file for sample in audit_from_stored_measurements(folder, DATA, memo=AuditMemo(path), digests=digests)
    ] == [
        "d.mp4",
        "cut.mp4",
        "c.mp4",
    ]
    with pytest.raises(AssertionError, match=r"b\.mp4 is decoded"):
        audit_media(folder, DATA, memo=AuditMemo(path), digests=digests)


def test_what_broke_the_decoder_is_tried_again_and_remembered(tmp_path: Path) -> None:
    media = MediaFile(tmp_path / "a.mp4")
    encode(media.path, moving("a"))
    digests, memo = Digests(tmp_path / "digests.json"), AuditMemo(tmp_path / "memo.jsonl")
    failed_probe = ProbedFile(
        (collect_media_findings(media, probe_file(MediaFile(tmp_path / "no")), None)[0],), broke=True
    )
    memo.store(media, digests.hash_media(media), failed_probe)
    clips = [Clip("a.mp4", media, "")]
    assert [sample.verdict for sample in audit_from_stored_measurements(clips, None, memo=memo, digests=digests)] == [
        "reject"
    ]
    assert [sample.verdict for sample in audit_media(clips, None, memo=memo, digests=digests)] == ["ok"]


def test_copies_and_first_images_are_named_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode(tmp_path / "a.mp4", moving("a"))
    encode(tmp_path / "near.mp4", moving("a"), options={"crf": "32"})
    encode(tmp_path / "other.mp4", moving("other"))
    (tmp_path / "same.mp4").write_bytes((tmp_path / "a.mp4").read_bytes())
    Image.new("RGB", (48, 32)).save(tmp_path / "black.png")
    names = ("a.mp4", "near.mp4", "other.mp4", "same.mp4")
    clips = [Clip(name, MediaFile(tmp_path / name), "") for name in names]
    image = MediaFile(tmp_path / "black.png")
    clips.append(Clip("b.mp4", MediaFile(tmp_path / "other.mp4"), "", image))
    sample_by_file = {sample.file: sample for sample in audit_media(clips, DATA)}
    assert {name: codes(sample) for name, sample in sample_by_file.items()} == {
        "a.mp4": [],
        "near.mp4": ["near_duplicate_clip"],
        "other.mp4": [],
        "same.mp4": ["duplicate_clip"],
        "b.mp4": ["black"],
    }
    assert all(sample.thumbnail for sample in sample_by_file.values())
    thumbnail = Image.open(io.BytesIO(sample_by_file["same.mp4"].thumbnail or b""))
    assert thumbnail.format == "JPEG"
    assert thumbnail.size == (320, 53)
    first_frame = moving("a")[0].astype(float)
    corner = np.asarray(thumbnail.crop((0, 0, 80, 53)).resize((48, 32), Image.Resampling.BOX), float)
    assert np.abs(corner - first_frame).mean() < 12
    # Of a large set, good samples have no thumbnail.
    monkeypatch.setattr(runner, "_MAX_GOOD_THUMBNAILS", 1)
    assert [bool(sample.thumbnail) for sample in audit_media(clips, DATA)] == [False, True, False, True, True]


def test_equal_clips_of_different_shapes_do_not_look_alike(tmp_path: Path) -> None:
    """A red disc, a green one, a square: other clips."""
    paths = write_shapes(tmp_path, clips=6, frames=9, height=64, width=96, fps=8)
    clips = [Clip(path.name, MediaFile(path), "") for path in paths]
    assert [codes(sample) for sample in audit_media(clips, None)] == [[]] * 6


PICTURES = {
    "black": flat(0),
    "constant": flat(90),
    "frozen": np.repeat(moving("a", 1), FRAMES, axis=0),
    "hard_cut": np.concatenate([moving("a", 8) // 3, 255 - moving("b", 8) // 3]),
    "low_range": moving("a") // 4 + 100,
    "": moving("a"),
}


@pytest.mark.parametrize("code", list(PICTURES))
def test_decoded_frames_are_judged_as_files_are(tmp_path: Path, code: str) -> None:
    video = PICTURES[code]
    encode(tmp_path / "a.mp4", video)
    media = MediaFile(tmp_path / "a.mp4")
    of_file = [finding.code for finding in collect_media_findings(media, probe_file(media), None)]
    frames = torch.from_numpy(video).permute(0, 3, 1, 2)
    assert [finding.code for finding in collect_frame_findings(frames)] == of_file == [code] * bool(code)


def test_one_decoded_image_is_judged() -> None:
    black, image = (torch.from_numpy(video[:1]).permute(0, 3, 1, 2) for video in (flat(3), moving("a")))
    assert [finding.code for finding in collect_frame_findings(black)] == ["black"]
    assert collect_frame_findings(image) == []
