"""A step's samples: of one bucket, the same from whatever side, and unmoved by a sample that is not there."""

import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from dit_lora.data.loading.order import SampleOrder
from dit_lora.data.loading.quarantine import Quarantine, QuarantineRecord

IDS = [f"clips/{name}.mp4" for name in ("cat", "dog", "hen", "fox", "owl", "elk", "bee")]
MANY = [f"{number}.mp4" for number in range(23)]
SHAPES = {name: "abbcccc"[number % 7] for number, name in enumerate(MANY)}


def left_out(sample: str, from_epoch: int = 0, to_epoch: int | None = None, from_copy: int = 0) -> QuarantineRecord:
    return QuarantineRecord(sample, from_epoch, to_epoch, 12, "data", "it has 1 NaN", from_copy)


def place(one: SampleOrder, position: int) -> tuple[int, int]:
    """Epoch and index of the sample at a position."""
    draw = one.get_occurrence(position)
    return draw.epoch, draw.sample_index


def bucketed(
    *records: QuarantineRecord,
    ids: Sequence[str] = MANY,
    group: int = 4,
    times: Sequence[float] | None = None,
) -> SampleOrder:
    """Three buckets, of very different size."""
    return SampleOrder(
        ids,
        seed=3,
        quarantine=Quarantine(Path("quarantine.jsonl"), records),
        samples_per_step=group,
        buckets=[SHAPES[sample] for sample in ids],
        times_per_epoch=times,
    )


Named = tuple[int, int, str]


def named(one: SampleOrder, positions: Iterable[int]) -> list[Named]:
    """(epoch, copy, sample) at each position."""
    draws = [one.get_occurrence(position) for position in positions]
    return [(draw.epoch, draw.copy, one.ids[draw.sample_index]) for draw in draws]


def hashed(seed: int, stream: str, *place: object) -> bytes:
    text = "/".join(map(str, (seed, stream, *place)))
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def copies(sample: str, seed: int, epoch: int, times: float) -> int:
    num_full, share = divmod(times, 1)
    phase = (int.from_bytes(hashed(seed, "times", sample), "big") >> 11) / 2**53
    return int(num_full) + math.floor(share * (epoch + 1) + phase) - math.floor(share * epoch + phase)


def permutation(one: SampleOrder, epoch: int, times: Mapping[str, float]) -> list[Named]:
    """An epoch sample by sample, with what is out of it left out."""
    rows = []
    for sample in one.ids:
        count = copies(sample, one.seed, epoch, times.get(sample, 1.0))
        streams = ["order", *(f"order+{copy}" for copy in range(1, count))]
        keys = sorted(hashed(one.seed, stream, epoch, sample) for stream in streams)
        for copy, key in enumerate(keys):
            if not one.quarantine.is_copy_quarantined(sample, epoch, copy):
                rows.append((key, copy, sample))
    return [(epoch, copy, sample) for _, copy, sample in sorted(rows)]


def walked(one: SampleOrder, steps: int, times: Mapping[str, float] = MappingProxyType({})) -> list[Named]:
    """The draws of the first steps by the words of the module's docstring: a stream, and queues."""
    queues: dict[str, list[Named]] = {}
    draws: list[Named] = []
    for epoch in itertools.count():
        for draw in permutation(one, epoch, times):
            queue = queues.setdefault(SHAPES[draw[2]], [])
            queue.append(draw)
            if len(queue) == one.samples_per_step:
                draws += queue
                queue.clear()
                if len(draws) == steps * one.samples_per_step:
                    return draws
    raise AssertionError


@pytest.mark.parametrize("group", [1, 2, 5, 7, 16])
def test_without_buckets_the_steps_are_the_epochs_one_after_another(group: int) -> None:
    """Bit for bit what it was before there were buckets, whatever the size of a step."""
    records = [left_out(IDS[2], 1), left_out(IDS[5], 3, 4)]
    quarantine = Quarantine(Path("nowhere"), records)
    single_order = SampleOrder(IDS, seed=7, quarantine=quarantine, samples_per_step=group)
    expected = [
        (epoch, IDS.index(sample))
        for epoch in range(40)
        for sample in sorted(IDS, key=lambda name: hashed(7, "order", epoch, name))
        if not (sample == IDS[2] and epoch >= 1) and not (sample == IDS[5] and epoch in (3, 4))
    ]
    assert [place(single_order, position) for position in range(208)] == expected[:208]


def test_the_first_positions_of_a_run_never_change() -> None:
    """A golden row: resumed runs rely on it."""
    single_order = SampleOrder(IDS, seed=0, quarantine=Quarantine(Path("nowhere")))
    assert [single_order.get_occurrence(position).sample_index for position in range(14)] == [
        3,
        1,
        2,
        5,
        6,
        4,
        0,
        3,
        0,
        4,
        6,
        1,
        2,
        5,
    ]


def random_case(seed: int) -> tuple[SampleOrder, dict[str, float]]:
    draw = random.Random(seed)
    ids = draw.sample(MANY, draw.randint(3, len(MANY)))
    times = {name: draw.choice([1, 1, 1.5, 2, 2.25, 3.9]) for name in ids} if seed % 2 else {}
    records = []
    for sample in draw.sample(ids, len(ids) // 3):
        for _ in range(draw.randint(1, 3)):
            start_epoch = draw.randint(0, 30)
            end_epoch = draw.choice([None, start_epoch, start_epoch + draw.randint(0, 60)])
            records.append(left_out(sample, start_epoch, end_epoch, draw.choice([0, 0, 1, 2])))
    group = draw.randint(1, 9)
    expected_times = [times.get(name, 1.0) for name in ids]
    return bucketed(*records, ids=ids, group=group, times=expected_times), times


@pytest.mark.parametrize("seed", range(12))
def test_jumping_to_a_position_finds_what_walking_there_finds(seed: int) -> None:
    """With samples left out for a while or for good, and copies."""
    random_order, times = random_case(seed)
    steps = 160
    expected = walked(random_order, steps, times)
    positions = list(range(len(expected)))
    assert named(random_order, positions) == expected
    random.Random(seed).shuffle(positions)
    jumping, _ = random_case(seed)
    assert named(jumping, positions[:60]) == [expected[p] for p in positions[:60]]


def test_a_late_position_is_found_in_a_fresh_order() -> None:
    expected = walked(bucketed(), 2500)
    for step in (2499, 1234, 2000):
        positions = range(4 * step, 4 * step + 4)
        assert named(bucketed(), positions) == [expected[position] for position in positions]


def test_a_position_is_found_without_hashing_all_epochs_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashes = 0
    keys = SampleOrder._compute_sort_keys

    def counted(one: SampleOrder, epoch: int, index: np.ndarray, copy: np.ndarray) -> np.ndarray:
        nonlocal hashes
        hashes += len(index)
        return keys(one, epoch, index, copy)

    monkeypatch.setattr(SampleOrder, "_compute_sort_keys", counted)
    ids = [f"{number}" for number in range(1000)]
    shapes = ["one", *(f"{number % 9}" for number in range(999))]
    times = [1.0 + number % 3 / 2 for number in range(1000)]
    quarantine = Quarantine(Path("nowhere"), [left_out("5", 3)])
    options = {
        "buckets": shapes,
        "times_per_epoch": times,
        "samples_per_step": 32,
        "quarantine": quarantine,
    }
    assert SampleOrder(ids, seed=0, **options).get_occurrence(10**9).epoch > 600_000
    assert hashes < 4500  # an epoch has 1500
    hashes = 0
    quarantine.add([left_out(sample, 50_000, 500_000) for sample in ids if sample != "1"])
    late = SampleOrder(ids, seed=0, **options)
    step = [late.get_occurrence(2_361_655 * 32 + offset) for offset in range(32)]
    assert {draw.sample_index for draw in step} == {0}  # half of it waited all that time
    assert [draw.epoch for draw in step] == [*range(49_984, 50_000), *range(500_001, 500_017)]
    assert hashes < 4500


def test_no_step_mixes_buckets_and_every_sample_comes_once_an_epoch() -> None:
    run = bucketed()
    draws = named(run, range(4 * 600))
    steps = [draws[start : start + 4] for start in range(0, len(draws), 4)]
    assert all(len({SHAPES[sample] for _, _, sample in step}) == 1 for step in steps)
    for shape in "abc":
        members = [sample for sample in MANY if SHAPES[sample] == shape]
        stream = [sample for _, _, sample in draws if SHAPES[sample] == shape]
        full_length = len(stream) // len(members) * len(members)
        epochs = [sorted(stream[i : i + len(members)]) for i in range(0, full_length, len(members))]
        assert len(epochs) > 90
        assert epochs == [sorted(members)] * len(epochs)


def test_leftovers_wait_for_the_next_epoch_and_nothing_is_lost() -> None:
    """The bucket of four samples in steps of nine: every step has samples of three epochs."""
    run = bucketed(group=9)
    draws = named(run, range(9 * 40))
    spans = [
        {epoch for epoch, _, _ in draws[start : start + 9]}
        for start in range(0, len(draws), 9)
        if SHAPES[draws[start][2]] == "a"
    ]
    assert len(spans) > 5
    assert {len(span) for span in spans} == {3}
    bucket_draws = [draw for draw in draws if SHAPES[draw[2]] == "a"]
    assert len(set(bucket_draws)) == len(bucket_draws)


@pytest.mark.parametrize("times", [None, [1.0 + number % 4 * 0.75 for number in range(23)]])
@pytest.mark.parametrize("step", [0, 3, 17, 60])
def test_leaving_out_a_sample_changes_no_step_before_it(step: int, times: list[float] | None) -> None:
    """From the draw on that was bad; the other samples of its bucket close ranks, other buckets stay."""
    before = named(bucketed(times=times), range(1200))
    step_draws = before[4 * step : 4 * step + 4]
    for epoch, copy, sample in step_draws:
        first_draw = min(draw for draw in step_draws if draw[2] == sample)
        record = left_out(sample, first_draw[0], from_copy=first_draw[1])
        after = named(bucketed(record, times=times), range(1000))
        assert after[: 4 * step] == before[: 4 * step]
        assert (epoch, copy, sample) not in after[4 * step :]
        for shape in "abc":
            remaining = [
                draw for draw in before if SHAPES[draw[2]] == shape and not (draw[2] == sample and draw >= first_draw)
            ]
            remaining_draws = [draw for draw in after if SHAPES[draw[2]] == shape]
            assert remaining_draws == remaining[: len(remaining_draws)]
            assert len(remaining_draws) > 100


@pytest.mark.parametrize("bad", [["4.mp4"], ["1.mp4", "2.mp4"], ["0.mp4", "7.mp4", "14.mp4"]])
def test_samples_left_out_at_their_first_step_were_never_there(bad: list[str]) -> None:
    """The run trips at a step, leaves its bad samples out and takes the step again."""
    ids = [name for name in MANY if name not in bad]
    times = [1.0 + number % 3 / 2 for number in range(23)]
    kept_times = [count for name, count in zip(MANY, times, strict=True) if name not in bad]
    run, steps = bucketed(times=times), []
    while len(steps) < 150:
        step_draws = named(run, range(4 * len(steps), 4 * len(steps) + 4))
        bad_samples = {sample for _, _, sample in step_draws if sample in bad}
        if not bad_samples:
            steps.append(step_draws)
            continue
        for sample in bad_samples:
            epoch, copy, _ = min(draw for draw in step_draws if draw[2] == sample)
            run.quarantine.add([left_out(sample, epoch, from_copy=copy)])
        run.reset()
    assert list(itertools.chain(*steps)) == named(bucketed(ids=ids, times=kept_times), range(600))


def test_a_bucket_that_is_all_out_stops_coming_and_the_others_go_on() -> None:
    bucket_samples = [sample for sample in MANY if SHAPES[sample] == "a"]
    run = bucketed(*(left_out(sample, 5) for sample in bucket_samples))
    draws = named(run, range(4 * 300))
    last_position = max(position for position, draw in enumerate(draws) if draw[2] in bucket_samples)
    assert last_position < 200
    assert draws == walked(run, 300)
    resumed_order = bucketed(*(left_out(sample, 5, 900) for sample in bucket_samples), group=3)
    assert named(resumed_order, range(15_300, 15_900)) == walked(resumed_order, 5300)[15_300:15_900]


def test_times_are_how_often_a_sample_comes_in_an_epoch() -> None:
    times = [1.0, 2.0, 2.5, 1.25, 3.0, 1.0, 1.9]
    run = SampleOrder(IDS, seed=7, quarantine=Quarantine(Path("nowhere")), times_per_epoch=times)
    count = Counter(run.get_occurrence(p)[::2] for p in range(4000))  # by epoch and sample
    max_epoch = max(epoch for epoch, _ in count)
    assert max_epoch > 300
    for index, expected in enumerate(times):
        counts_by_epoch = [count[epoch, index] for epoch in range(max_epoch)]
        assert {*counts_by_epoch} <= {math.floor(expected), math.ceil(expected)}
        assert abs(sum(counts_by_epoch) - expected * max_epoch) <= 1
    assert len({run.get_occurrence(p) for p in range(4000)}) == 4000


def test_copies_are_numbered_as_they_come_and_scattered_over_the_epoch() -> None:
    run = SampleOrder(IDS, seed=7, quarantine=Quarantine(Path("nowhere")), times_per_epoch=[4.0] * 7)
    for epoch in range(20):
        draws = [run.get_occurrence(position) for position in range(28 * epoch, 28 * epoch + 28)]
        assert {draw.epoch for draw in draws} == {epoch}
        for index in range(7):
            assert [draw.copy for draw in draws if draw.sample_index == index] == [0, 1, 2, 3]
        num_adjacent = sum(draw.index == following.index for draw, following in pairwise(draws))
        assert num_adjacent < 14


@pytest.mark.parametrize("times", [0.5, math.nan, math.inf])
def test_a_sample_comes_at_least_once(times: float) -> None:
    with pytest.raises(ValueError, match="at least once"):
        SampleOrder(IDS, seed=7, quarantine=Quarantine(Path("nowhere")), times_per_epoch=[1.0] * 6 + [times])


def test_an_epoch_that_all_samples_sit_out_is_passed_over() -> None:
    quarantine = Quarantine(Path("nowhere"), [left_out(sample, 1, 2) for sample in IDS])
    run = SampleOrder(IDS, seed=7, quarantine=quarantine)
    assert [place(run, position)[0] for position in range(14)] == [0] * 7 + [3] * 7
