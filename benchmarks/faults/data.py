"""Faults of the data: one bad sample among the good ones. The run names and refuses it, or goes on without it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.fault import Expected, Fault, FaultResult, equal
from benchmarks.faults.media.all import KINDS
from benchmarks.faults.media.archives import member, write_tar
from benchmarks.faults.media.cache import cut, scramble
from benchmarks.faults.media.encode import added_tone
from benchmarks.faults.media.kind import Kind, write_good
from benchmarks.faults.targets import FaultTargets
from benchmarks.faults.world import Engine, Observation, Overrides, Stage, World, poisoned_files
from dit_lora.data.cache.cache import TensorCache
from dit_lora.data.cache.shards import StoredEntry
from dit_lora.data.media.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES

Change = Callable[[Path], None]
"""Changes a run's folder of data."""
_METADATA = "metadata.jsonl"
_LISTED = VIDEO_SUFFIXES | IMAGE_SUFFIXES


def _leave(folder: Path) -> None:
    """Leave the folder as it is."""


@dataclass(frozen=True)
class DataFault(Fault):
    """A sample that the run must refuse by name, or leave out as if it had never been there."""

    file: str = ""
    """The sample's id."""
    add_sample: Change = _leave
    """Writes the bad sample."""
    layout: Change = _leave
    """Changes the good data first, with and without the bad sample."""
    samples: str = "clips"
    """The fault applies to variants that are trained on samples of this kind."""

    def fits(self, targets: FaultTargets, ranks: int = 1, engine: Engine = "ddp") -> bool:
        # Pairs are images with files beside them.
        samples = "images" if targets.pairs else targets.samples
        return samples == self.samples and super().fits(targets, ranks, engine)

    def judge(self, world: World) -> FaultResult:
        """Judge a run that refuses the sample, one that leaves out it and its peers, one that never had them;
        collective.
        """
        data = self.folder(world, self.name, self.layout, self.add_sample)
        stages_reached: list[Stage] = []
        refused = self.run(world, f"{self.name}, refuse", self.data_overrides(data), stages_reached)
        error = str(refused.error or "")
        message = " ".join(line for line in error.split("\n") if self.file in line)
        unnamed = [f"not said: {w}" for w in (self.file, *self.expected.message_parts) if w not in message]
        if stages_reached:
            unnamed.append("training had begun")
        left_out = self.left_out(world)
        # One run for all peers: one for each would double the time that the suite takes.
        return self.make_result((refused, left_out), message or error, unnamed, self.lacks(world, left_out))

    def data_overrides(self, data: Path) -> Overrides:
        return (*self.overrides, ("data.path", str(data)))

    def run(self, world: World, name: str, overrides: Overrides, reached: list[Stage] | None = None) -> Observation:
        """Run once; `reached` gets its stage when it is about to train."""
        arm = None if reached is None else reached.append
        return world.observe(name, arm, overrides)

    def folder(self, world: World, name: str, *changes: Change) -> Path:
        """Copy the good data and apply the changes. One rank writes it."""

        def apply_changes(folder: Path) -> None:
            with added_tone(world.targets.sound):
                for change in changes:
                    change(folder)

        return world.copy_data(world.root / "data" / name, apply_changes)

    def peers(self, targets: FaultTargets) -> tuple["DataFault", ...]:
        """The faults, this one included, whose samples one run leaves out together."""
        similar_faults = [
            fault for fault in _SAMPLES if fault.file and fault.layout == self.layout and fault.fits(targets)
        ]
        return tuple(dict.fromkeys([*similar_faults, self]))

    def left_out(self, world: World) -> Observation:
        """Run once without the rejected samples. All faults of `peers` share this run."""
        peers = self.peers(world.targets)
        if peers not in world.shared:
            name = f"all left out {len(world.shared)}"
            data = self.folder(world, name, self.layout, *(peer.add_sample for peer in peers))
            skip = (*self.data_overrides(data), ("data.rejects", "skip"))
            world.shared[peers] = self.run(world, name, skip)
        return world.shared[peers]

    def lacks(self, world: World, left_out: Observation) -> list[str]:
        """List what the run that continues without the sample did wrong."""
        if left_out.error is not None:
            return [f"it failed without the sample: {left_out.error}"]
        events = [event for event in left_out.events if event.get("kind") == "data_rejected"]
        ids = sorted(sample for event in events for sample in event["sample_ids"])
        lacks = []
        if ids != sorted(peer.file for peer in self.peers(world.targets)):
            lacks.append(f"events name {ids}")
        if self.file not in left_out.stderr:
            lacks.append(f"not said: {self.file} is left out")
        run_overrides = self.overrides
        if self.layout is not _leave:
            run_overrides = self.data_overrides(self.folder(world, f"{self.name}, never", self.layout))
        if not equal(left_out.adapter, world.reference("clean", run_overrides)):
            lacks.append("the adapter is not that of a run that never had the sample")
        return lacks

    def make_result(
        self, observations: tuple[Observation, ...], verdict: str, unnamed: list[str], lost: list[str]
    ) -> FaultResult:
        return FaultResult(
            self.name,
            self.location,
            self.when,
            named=not unnamed,
            recovered=not lost,
            poisoned_files=sum(len(poisoned_files(observation)) for observation in observations),
            action=self.expected.action,
            verdict=" ".join(verdict.split()),
            why=(*unnamed, *lost),
        )


@dataclass(frozen=True)
class SoundOddity(DataFault):
    """Samples that look odd and are sound: the run must train on each of them."""

    files: tuple[str, ...] = ()
    """The samples' ids."""

    def judge(self, world: World) -> FaultResult:
        """Judge one run that may refuse; collective."""
        data = self.folder(world, self.name, self.layout, self.add_sample)
        stages_reached: list[Stage] = []
        observation = self.run(world, self.name, self.data_overrides(data), stages_reached)
        unnamed = [f"an event: {event}" for event in observation.events]
        if observation.error is not None:
            unnamed.append(f"refused: {observation.error}")
        encoded: list[Any] = [stage.run.data for stage in stages_reached]
        entries = [entry for run_data in encoded for entry in run_data.training_set.entries]
        keys = {entry.id: entry.video_key for entry in entries if entry.id in self.files}
        problems = [f"{file} is not trained on" for file in self.files if file not in keys]
        if len(set(keys.values())) < len(keys):
            problems.append(f"{', '.join(keys)} share one cache entry")
        if observation.adapter is None:
            problems.append("no adapter was saved")
        return self.make_result((observation,), "nothing to tell: it is trained on", unnamed, problems)


def _change_of_kind(kind: Kind) -> Change:
    """Make a change that adds this kind's sample to the good data, and to its metadata.jsonl if there is one."""

    def add_sample(folder: Path) -> None:
        before = {*folder.rglob("*.*")}
        kind.make(folder)
        for path in sorted({*folder.rglob("*.*")} - before):
            if path.suffix.lower() in _LISTED and (folder / _METADATA).exists():
                _list(folder, path.relative_to(folder).as_posix())

    return add_sample


def _list(folder: Path, file: str) -> None:
    """Add a line to metadata.jsonl: the caption from the file's .txt, or a default, and the first line's reference."""
    listing, caption_file = folder / _METADATA, (folder / file).with_suffix(".txt")
    lines = listing.read_text("utf-8").splitlines(keepends=True)
    text = caption_file.read_text("utf-8") if caption_file.exists() else "a clip"
    row = json.loads(lines[0]) | {"file_name": file, "text": text}
    row.pop("masks", None)  # it has the shape of its own picture
    listing.write_text("".join([*lines, json.dumps(row) + "\n"]), "utf-8")


def _into_tar(folder: Path) -> None:
    """Pack all clips and their captions into one tar, in place of files and list."""
    rows = map(json.loads, (folder / _METADATA).read_text("utf-8").splitlines())
    members = []
    for row in rows:
        path = folder / row["file_name"]
        members += [
            member(path.name, path.read_bytes()),
            member(f"{path.stem}.txt", row["text"].encode()),
        ]
        path.unlink()
    (folder / _METADATA).unlink()
    write_tar(folder / _TAR, members)


def _climbing_member(folder: Path) -> None:
    """Add a member whose name leads out of the folder."""
    clip = folder / "clip.mp4"
    write_good(clip)
    write_tar(folder / _TAR, [member("../clip.mp4", clip.read_bytes())], "a")
    clip.unlink()
    clip.with_suffix(".txt").unlink()


def _silent_clip(folder: Path) -> None:
    """Add a clip that has no sound."""
    with added_tone(False):
        write_good(folder / "silent.mp4")
    _list(folder, "silent.mp4")


def _unknown_label(folder: Path) -> None:
    """Add a sample of a class that the recipe does not name."""
    good = next(path for path in sorted((folder / "0").iterdir()))
    (folder / "2").mkdir()
    shutil.copy(good, folder / "2" / f"clip{good.suffix}")


def _bad(name: str, file: str, reason: str, add_sample: Change, **more: Any) -> DataFault:
    expected = Expected("refused", "left out", (reason,), same_as="clean")
    return DataFault(f"data: {name}", "data", "before training", expected, file=file, add_sample=add_sample, **more)


def _bad_kind(name: str, reason: str, samples: str = "clips") -> DataFault:
    kind = _BY_NAME[name]
    return _bad(name, kind.file, reason, _change_of_kind(kind), samples=samples)


def _odd(name: str, *files: str) -> SoundOddity:
    return SoundOddity(
        f"data: {name}",
        "data",
        "before training",
        Expected("none", "none"),
        add_sample=_change_of_kind(_BY_NAME[name]),
        files=files,
    )


def _unknown(sample_name: str, samples: str, suffix: str) -> DataFault:
    return _bad(
        f"{sample_name} of a class outside the table",
        f"2/clip{suffix}",
        "class",
        _unknown_label,
        overrides=(("data.classes", ("0", "1")),),
        samples=samples,
    )


def _damaged(name: str, do: Callable[[StoredEntry], None]) -> Fault:
    """A damaged shard of the cache, which has to be encoded again."""

    def before_start(cache: Path) -> None:
        do(next(TensorCache(cache / "videos").iter_entries()))

    expected = Expected("none", "none", same_as="clean")
    return Fault(
        name,
        "cache",
        "from the start",
        expected,
        before_start=before_start,
        needs=("encoded",),
    )


_BY_NAME = {kind.name: kind for kind in KINDS}
_TAR = "clips.tar"
_DECODE = "cannot be decoded"
_SAMPLES: tuple[DataFault, ...] = (
    _bad_kind("no bytes", "empty_file: the file has no bytes"),
    _bad_kind("text named .mp4", "not_media: "),
    _bad_kind("cut before the header", "truncated: the file ends early"),
    _bad_kind("cut in the frames", _DECODE),
    _bad_kind("damaged in the middle", _DECODE),
    _bad_kind("sound only", "no_video_stream: "),
    _bad_kind("one frame", "too short"),
    _bad_kind("all black", "black: "),
    _bad_kind("an empty caption", "its caption is empty"),
    _bad("a missing file", "gone.mp4", "no such file", lambda folder: _list(folder, "gone.mp4")),
    _bad(
        "a tar's member that climbs out",
        f"{_TAR}/../clip.mp4",
        "its name leaves the folder",
        _climbing_member,
        layout=_into_tar,
    ),
    _bad("a clip without sound", "silent.mp4", "no_sound: ", _silent_clip, needs=("sound",)),
    _odd("two clips of one stem", "one/clip.mp4", "two/clip.mp4"),
    _odd("a variable frame rate", "vfr.mp4"),
    _odd("a rotation flag", "turned.mp4"),
    _bad_kind("no bytes in an image", "empty_file: the file has no bytes", "images"),
    _bad_kind("an error page named .jpg", "not_media: ", "images"),
    _bad_kind("a jpeg cut in half", _DECODE, "images"),
    _bad_kind("a black image", "black: ", "images"),
    _unknown("an image", "classes", ".png"),
    _unknown("a clip", "class_clips", ".mp4"),
)
FAULTS: tuple[Fault, ...] = (
    *_SAMPLES,
    _damaged("a torn shard of the cache", cut),
    _damaged("a shard of the cache with a damaged header", scramble),
)
