"""Which sample comes when: a function of seed and position, whatever the split."""

import os
import pickle
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dit_lora.config.data import VideoShape
from dit_lora.data.cache.cache import TensorCache, encode_entry
from dit_lora.data.loading.batch import (
    LOSS_WEIGHT,
    Batch,
    DataReadingSettings,
    PositionSampler,
    build_loader,
    collate,
    make_sample_seed,
)
from dit_lora.data.loading.encoded import CachedClips, ClipDataset, SampleCacheKeys
from dit_lora.data.loading.quarantine import Quarantine, QuarantineRecord


@pytest.fixture
def clips(tmp_path: Path) -> CachedClips:
    videos, texts = TensorCache(tmp_path / "v"), TensorCache(tmp_path / "t")
    texts.write_entries([encode_entry("empty", {"prompt_embeds": torch.zeros(2, 3)}, sample="", facts={})])
    entries = []
    for k in range(5):
        videos.write_entries(
            [encode_entry(f"v{k}", {"latent_mean": torch.full((2, 2), float(k))}, sample="", facts={})]
        )
        texts.write_entries(
            [encode_entry(f"t{k}", {"prompt_embeds": torch.full((2, 3), k + 1.0)}, sample="", facts={})]
        )
        entries.append(SampleCacheKeys(f"{k}.mp4", f"v{k}", f"t{k}"))
    return CachedClips(tuple(entries), "empty", videos, texts)


def how(sampler: PositionSampler | None = None, **settings: Any) -> DataReadingSettings:
    """Settings of a run whose steps take one sample, unless the sampler says otherwise."""
    values = {
        "start_step": 0,
        "steps": 1,
        "batch_size": 1,
        "accumulate": 1,
        "rank": 0,
        "num_ranks": 1,
    }
    defaults = {"seed": 0, "caption_dropout": 0.0, "workers": 0, "prefetch": 2}
    empty_quarantine = Quarantine(Path("nowhere"))
    return DataReadingSettings(
        sampler or PositionSampler(**values),
        quarantine=empty_quarantine,
        pin_memory=False,
        **{**defaults, **settings},
    )


def clip_at(dataset: ClipDataset, position: int) -> tuple[int, SampleCacheKeys]:
    """The epoch and the clip at a position; a batch may span two epochs."""
    draw = dataset.order.get_occurrence(position)
    return draw.epoch, dataset.clips.entries[draw.sample_index]


def of(
    clips: CachedClips,
    seed: int = 0,
    caption_dropout: float = 0.0,
    quarantine: Quarantine | None = None,
) -> ClipDataset:
    settings = how(seed=seed, caption_dropout=caption_dropout)
    return ClipDataset(clips, replace(settings, quarantine=quarantine or settings.quarantine))


def ids_of(dataset: ClipDataset, positions: Iterable[int]) -> list[str]:
    return [clip_at(dataset, position)[1].id for position in positions]


def to_build_anew(clips: CachedClips, kinds: str = "v") -> list[str]:
    """The keys of clips that the next start finds missing."""
    cache = TensorCache(clips.videos.root)
    keys = [f"{kind}{number}" for kind in kinds for number in range(5)]
    return [key for key in keys if not cache.is_complete(key)]


def positions(**values: int) -> list[list[int]]:
    return list(PositionSampler(**{"start_step": 0, "rank": 0, "num_ranks": 1, **values}))


def flat(lists: list[list]) -> list:
    return [item for sublist in lists for item in sublist]


def test_a_steps_samples_do_not_depend_on_its_split() -> None:
    """batch 4 x 1, batch 1 x 4, two ranks x 2, two ranks x 1 x 2: the same four samples."""
    expected = positions(steps=3, batch_size=4, accumulate=1)
    assert expected == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    micro = positions(steps=3, batch_size=1, accumulate=4)
    assert [flat(micro[4 * s : 4 * s + 4]) for s in range(3)] == expected
    for batch_size, accumulate in ((2, 1), (1, 2)):
        ranks = [
            positions(steps=3, batch_size=batch_size, accumulate=accumulate, rank=rank, num_ranks=2) for rank in (0, 1)
        ]
        for step in range(3):
            step_slice = slice(step * accumulate, (step + 1) * accumulate)
            assert sorted(flat(ranks[0][step_slice] + ranks[1][step_slice])) == expected[step]


def test_resuming_goes_on_where_it_stopped() -> None:
    expected = positions(steps=20, batch_size=2, accumulate=3)
    assert positions(start_step=7, steps=20, batch_size=2, accumulate=3) == expected[7 * 3 :]


def test_every_epoch_is_another_permutation_of_all_clips(clips: CachedClips) -> None:
    epochs = [ids_of(of(clips), range(5 * e, 5 * e + 5)) for e in range(6)]
    assert all(sorted(epoch) == [f"{k}.mp4" for k in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 2
    assert [clip_at(of(clips), p)[0] for p in range(30)] == [p // 5 for p in range(30)]
    assert ids_of(of(clips), reversed(range(30))) == flat(epochs)[::-1]
    assert ids_of(of(clips, seed=1), range(30)) != flat(epochs)


def test_a_batch_spans_two_epochs_and_keeps_rows_apart(clips: CachedClips) -> None:
    dataset = of(clips)
    sampler = PositionSampler(start_step=0, steps=3, batch_size=3, accumulate=1, rank=0, num_ranks=1)
    batches = list(build_loader(dataset, how(sampler)))
    batch = batches[1]  # positions 3, 4, 5
    assert batch.sample_seeds == tuple(map(make_sample_seed, batch.ids, (0, 0, 1)))
    for row, sample in enumerate(batch.ids):
        k = float(sample.removesuffix(".mp4"))
        assert (batch.tensors["latent_mean"][row] == k).all()
        assert (batch.tensors["prompt_embeds"][row] == k + 1).all()
    assert not batch.faults


def test_reading_neither_moves_a_global_generator_nor_draws_from_one(clips: CachedClips) -> None:
    """In the process itself: so workers, whose generators differ, cannot give anything else."""
    entries = tuple(replace(entry, mirror_key=entry.video_key) for entry in clips.entries)
    dataset = of(replace(clips, entries=entries), seed=3, caption_dropout=0.5)
    sampler = PositionSampler(start_step=0, steps=9, batch_size=1, accumulate=1, rank=0, num_ranks=1)

    def states() -> list[Any]:
        legacy = np.random.get_state()[1]  # noqa: NPY002
        return [random.getstate(), legacy.tolist(), torch.get_rng_state().tolist()]

    def texts(seed: int) -> list[float]:
        random.seed(seed)
        torch.manual_seed(seed)
        before = states()
        loader = build_loader(dataset, how(sampler))
        max_values = [batch.tensors["prompt_embeds"].max().item() for batch in loader]
        assert states() == before
        return max_values

    assert texts(0) == texts(1)


def drawn(clips: CachedClips, workers: int, split: tuple[int, int, int]) -> list[dict]:
    """By sample, of each step, what the ranks of a run read: draw number, caption or none."""
    batch_size, accumulate, ranks = split
    steps: list[dict] = [{} for _ in range(5)]
    for rank in range(ranks):
        sizes = {
            "batch_size": batch_size,
            "accumulate": accumulate,
            "rank": rank,
            "num_ranks": ranks,
        }
        sampler = PositionSampler(start_step=0, steps=5, **sizes)
        dataset = of(clips, seed=3, caption_dropout=0.5)
        loader = build_loader(dataset, how(sampler, workers=workers, prefetch=3))
        for number, batch in enumerate(loader):
            text = batch.tensors["prompt_embeds"][:, 0, 0].tolist()
            rows = zip(batch.ids, batch.sample_seeds, text, strict=True)
            steps[number // accumulate] |= {(sample, draw): caption for sample, draw, caption in rows}
    return steps


def test_two_workers_and_two_ranks_draw_apart_and_as_one_process_would(clips: CachedClips) -> None:
    all_steps = drawn(clips, 0, (4, 1, 1))
    draws = [draw for step in all_steps for _, draw in step]
    assert len({*draws}) == len(draws) == 20
    assert {caption == 0 for step in all_steps for caption in step.values()} == {True, False}
    assert drawn(clips, 2, (1, 2, 2)) == all_steps
    assert drawn(clips, 2, (2, 2, 1)) == all_steps


def test_workers_wait_for_a_cache_that_is_away_and_one_of_them_says_so(
    clips: CachedClips, capfd: pytest.CaptureFixture[str]
) -> None:
    sampler = PositionSampler(start_step=0, steps=6, batch_size=1, accumulate=1, rank=0, num_ranks=1)
    loader = build_loader(of(clips), how(sampler, workers=2, prefetch=1))
    folder = clips.videos.root
    moved_folder = folder.rename(folder.with_name("away"))
    message, errors = "waiting up to 60 s for the folder", []

    def bring_back_when_missed() -> None:
        while message not in "".join(errors):
            time.sleep(0.05)
            errors.append(capfd.readouterr().err)
        moved_folder.rename(folder)

    thread = threading.Thread(target=bring_back_when_missed, daemon=True)
    thread.start()
    batches = list(loader)
    thread.join()
    assert not [batch.faults for batch in batches if batch.faults]
    assert "".join([*errors, capfd.readouterr().err]).count(message) == 1


@pytest.mark.parametrize("prefetch", [1, 4])
def test_workers_read_ahead_as_far_as_asked(clips: CachedClips, prefetch: int) -> None:
    sampler = PositionSampler(start_step=0, steps=1, batch_size=1, accumulate=1, rank=0, num_ranks=1)
    loaders = [build_loader(of(clips), how(sampler, workers=workers, prefetch=prefetch)) for workers in (1, 0)]
    assert [loader.prefetch_factor for loader in loaders] == [prefetch, None]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_captions_drop_at_the_asked_rate(clips: CachedClips, share: float) -> None:
    dataset = of(clips, caption_dropout=share)
    dropped_share = sum(not dataset[p].tensors["prompt_embeds"].any() for p in range(400)) / 400
    assert abs(dropped_share - share) < 0.08  # over three standard deviations


def test_which_captions_drop_depends_on_the_seed(clips: CachedClips) -> None:
    def pattern(seed: int) -> list[bool]:
        dataset = of(clips, seed=seed, caption_dropout=0.5)
        return [not dataset[p].tensors["prompt_embeds"].any() for p in range(40)]

    assert pattern(0) == pattern(0)
    assert pattern(0) != pattern(1)


def test_an_empty_caption_that_goes_bad_is_no_samples_fault(clips: CachedClips) -> None:
    dataset = of(clips, caption_dropout=1.0)
    path = clips.texts.find_shard_path("empty")
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    sample = dataset[0]
    assert not sample.faults
    assert not sample.tensors["prompt_embeds"].any()
    assert clips.texts.read("empty", {})[1]  # it is bad
    assert clips.mark_bad_entries(sample.ids) == []


def test_an_unreadable_first_entry_does_not_hide_the_others(clips: CachedClips) -> None:
    path = clips.videos.find_shard_path("v0")
    path.write_bytes(b"")
    dataset = of(clips)
    faults = [fault for p in range(5) for fault in dataset[p].faults]
    assert faults == ["0.mp4"]
    clips.mark_bad_entries(["0.mp4"])
    assert to_build_anew(clips) == ["v0"]


def test_a_bad_entry_is_a_fault_of_its_sample_alone(clips: CachedClips) -> None:
    path = clips.videos.find_shard_path("v2")
    path.write_bytes(path.read_bytes()[:50])
    dataset = of(clips)
    sampler = PositionSampler(start_step=0, steps=1, batch_size=5, accumulate=1, rank=0, num_ranks=1)
    batch: Batch = next(iter(build_loader(dataset, how(sampler))))
    assert list(batch.faults) == ["2.mp4"]
    row = batch.ids.index("2.mp4")
    assert batch.tensors["latent_mean"][row].isnan().all()
    assert batch.tensors["latent_mean"].isnan().sum() == 4
    clips.mark_bad_entries(["2.mp4", "3.mp4"])
    assert to_build_anew(clips) == ["v2"]


def test_an_entry_damaged_after_its_first_reading_is_marked(clips: CachedClips) -> None:
    """Digests are verified once per process, so training reads the damaged values; the mark needs a new look."""
    assert not clips.videos.read("v2", {})[1]
    path = clips.videos.find_shard_path("v2")
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    # A failing disk changes no time of the file.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    (mark_path,) = clips.mark_bad_entries(["2.mp4"])
    assert mark_path.exists()
    assert to_build_anew(clips) == ["v2"]


def left_out(sample: str, first: int = 0, last: int | None = None) -> QuarantineRecord:
    return QuarantineRecord(sample, first, last, step=1, cause="data", reason="bad")


def test_leaving_a_sample_out_changes_neither_the_others_order_nor_their_draws(
    clips: CachedClips,
) -> None:
    """As if the folder never had it, whatever is left out of it."""
    quarantine = Quarantine(Path("nowhere"), [left_out("2.mp4")])
    filtered = of(clips, caption_dropout=0.5, quarantine=quarantine)
    remaining_entries = [entry for entry in clips.entries if entry.id != "2.mp4"]
    dataset_without_bad = of(
        CachedClips(tuple(remaining_entries), "empty", clips.videos, clips.texts),
        caption_dropout=0.5,
    )
    for position in range(40):
        filtered_sample, expected_sample = filtered[position], dataset_without_bad[position]
        assert (filtered_sample.ids, filtered_sample.sample_seeds) == (
            expected_sample.ids,
            expected_sample.sample_seeds,
        )
        assert torch.equal(filtered_sample.tensors["prompt_embeds"], expected_sample.tensors["prompt_embeds"])
    all_ids = ids_of(of(clips), range(50))
    assert ids_of(filtered, range(40)) == [sample for sample in all_ids if sample != "2.mp4"]


def test_a_sample_that_is_out_for_one_epoch_is_back_in_the_next(clips: CachedClips) -> None:
    quarantine = Quarantine(Path("nowhere"), [left_out("1.mp4", 1, 1), left_out("3.mp4", 2)])
    dataset = of(clips, quarantine=quarantine)
    sizes = [5, 4, 4, 4]
    clip_positions = [clip_at(dataset, position) for position in range(sum(sizes))]
    by_epoch = [sorted(entry.id for e, entry in clip_positions if e == epoch) for epoch in range(4)]
    assert list(map(len, by_epoch)) == sizes
    missing = [{f"{k}.mp4" for k in range(5)} - set(epoch_ids) for epoch_ids in by_epoch]
    assert missing == [set(), {"1.mp4"}, {"3.mp4"}, {"3.mp4"}]


def test_draws_differ_between_samples_and_epochs_and_not_between_splits(clips: CachedClips) -> None:
    draws = [of(clips)[position].sample_seeds[0] for position in range(15)]
    assert len(set(draws)) == 15
    assert draws == [of(clips)[position].sample_seeds[0] for position in range(15)]


def test_one_sample_of_a_batch_keeps_its_row_draw_and_fault(clips: CachedClips) -> None:
    batch = collate([of(clips)[position] for position in range(3)])
    batch = replace(batch, faults={batch.ids[1]: "torn"})
    first_sample, second_sample = batch.select_sample(1), batch.select_sample(2)
    assert (first_sample.ids, first_sample.sample_seeds, first_sample.faults) == (
        batch.ids[1:2],
        batch.sample_seeds[1:2],
        batch.faults,
    )
    assert torch.equal(first_sample.tensors["latent_mean"], batch.tensors["latent_mean"][1:2])
    assert not second_sample.faults


def test_mirror_images_come_in_half_of_the_draws_by_sample_and_epoch(clips: CachedClips) -> None:
    for k in range(5):
        tensors = {"latent_mean": torch.full((2, 2), 100.0 + k)}
        clips.videos.write_entries([encode_entry(f"m{k}", tensors, sample="", facts={})])
    entries = tuple(replace(e, mirror_key=f"m{k}") for k, e in enumerate(clips.entries))
    dataset = of(replace(clips, entries=entries))
    values = [dataset[position].tensors["latent_mean"].max().item() for position in range(400)]
    assert 0.4 < sum(value >= 100 for value in values) / 400 < 0.6
    assert {value % 100 for value in values} == {0, 1, 2, 3, 4}
    assert values == [dataset[position].tensors["latent_mean"].max().item() for position in range(400)]
    path = clips.videos.find_shard_path("m2")
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    (bad_file,) = dataset.clips.mark_bad_entries(["2.mp4"])
    assert bad_file.exists()
    assert to_build_anew(clips, "mv") == ["m2"]


LARGE, SMALL = VideoShape(9, 32, 48), VideoShape(1, 32, 32)


@pytest.fixture
def mixed(clips: CachedClips) -> CachedClips:
    """Three clips of one shape, and two with smaller latents of another."""
    for number in (1, 3):
        small = {"latent_mean": torch.full((1, 2), float(number))}
        clips.videos.write_entries([encode_entry(f"s{number}", small, sample="", facts={})])
    entries = [
        replace(entry, shape=SMALL, video_key=f"s{number}") if number in (1, 3) else replace(entry, shape=LARGE)
        for number, entry in enumerate(clips.entries)
    ]
    return replace(clips, entries=tuple(entries))


def test_a_step_has_one_shape_however_it_is_split(mixed: CachedClips) -> None:
    steps: list[set] = [set() for _ in range(20)]
    for rank in (0, 1):
        sizes = {"batch_size": 1, "accumulate": 2, "rank": rank, "num_ranks": 2}
        sampler = PositionSampler(start_step=0, steps=20, **sizes)
        loader = build_loader(ClipDataset(mixed, how(sampler)), how(sampler))
        for number, batch in enumerate(loader):
            steps[number // 2].add(batch.tensors["latent_mean"].shape)
    assert all(len(step) == 1 for step in steps)
    assert {*flat(map(list, steps))} == {torch.Size([1, 2, 2]), torch.Size([1, 1, 2])}


def test_a_sampler_whose_steps_are_not_the_orders_is_refused(mixed: CachedClips) -> None:
    sampler = PositionSampler(start_step=0, steps=1, batch_size=2, accumulate=1, rank=0, num_ranks=1)
    with pytest.raises(ValueError, match="1 samples, one of the sampler 2"):
        build_loader(of(mixed), how(sampler))


def test_each_shape_has_its_spec_and_the_largest_stands_for_all(mixed: CachedClips) -> None:
    mixed.videos.find_shard_path("v0").write_bytes(b"")
    specs = mixed.video_specs
    assert {shape: tuple(spec["latent_mean"][0]) for shape, spec in specs.items()} == {
        LARGE: (2, 2),
        SMALL: (1, 2),
    }
    assert mixed.largest_shape == (LARGE, specs[LARGE] | mixed.text_spec)
    assert tuple(mixed.text_spec["prompt_embeds"][0]) == (2, 3)


@pytest.mark.parametrize(("number", "shape"), [(2, (1, 2, 2)), (3, (1, 1, 2))])
def test_an_unreadable_entry_is_nan_of_its_own_shape(mixed: CachedClips, number: int, shape: tuple[int, ...]) -> None:
    of(mixed)
    entry = mixed.entries[number]
    mixed.videos.find_shard_path(entry.video_key).write_bytes(b"")
    mixed.texts.find_shard_path(entry.text_key).write_bytes(b"")
    sample = mixed.read(entry, entry.text_key, 0)
    assert sample.tensors["latent_mean"].shape == shape
    assert sample.tensors["prompt_embeds"].shape == (1, 2, 3)
    assert all(tensor.isnan().all() for tensor in sample.tensors.values())
    assert sample.faults[entry.id].count("cannot be read") == 2


def test_loss_weights_are_in_a_batch_where_the_data_has_any(clips: CachedClips) -> None:
    assert LOSS_WEIGHT not in of(clips)[0].tensors
    entries = tuple(replace(e, loss_weight=1 + k / 4) for k, e in enumerate(clips.entries))
    dataset = of(replace(clips, entries=entries))
    batch = collate([dataset[position] for position in range(5)])
    weights = batch.tensors[LOSS_WEIGHT]
    assert weights.dtype == torch.float32
    assert weights.tolist() == [1 + int(sample[0]) / 4 for sample in batch.ids]
    assert batch.select_sample(3).tensors[LOSS_WEIGHT].tolist() == weights[3:4].tolist()


def test_copies_of_a_sample_draw_apart(clips: CachedClips) -> None:
    entries = tuple(replace(entry, times_per_epoch=3.0) for entry in clips.entries)
    dataset = of(replace(clips, entries=entries))
    samples = [dataset[position] for position in range(15)]
    assert {clip_at(dataset, position)[0] for position in range(15)} == {0}
    for number in range(5):
        draws = [sample.sample_seeds[0] for sample in samples if sample.ids == (f"{number}.mp4",)]
        assert draws == [make_sample_seed(f"{number}.mp4", 0, copy) for copy in range(3)]
    assert len({sample.sample_seeds[0] for sample in samples}) == 15


def test_a_data_set_reaches_a_worker_that_is_spawned(mixed: CachedClips) -> None:
    sampler = PositionSampler(start_step=0, steps=1, batch_size=2, accumulate=1, rank=0, num_ranks=1)
    dataset = ClipDataset(mixed, how(sampler, caption_dropout=0.5))
    unpickled = pickle.loads(pickle.dumps(dataset))
    for position in range(10):
        local_sample, unpickled_sample = dataset[position], unpickled[position]
        assert (local_sample.ids, local_sample.sample_seeds) == (
            unpickled_sample.ids,
            unpickled_sample.sample_seeds,
        )
        assert all(
            torch.equal(local_sample.tensors[name], unpickled_sample.tensors[name]) for name in local_sample.tensors
        )
