"""Leaving a sample out changes nothing of the order of the others, from the epoch in which it is first met."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dit_lora.data.loading.order import SampleOrder
from dit_lora.data.loading.quarantine import Quarantine, QuarantineRecord
from dit_lora.errors import DitLoraError

IDS = [f"clips/{name}.mp4" for name in ("cat", "dog", "hen", "fox", "owl", "elk", "bee")]
SEEDS = [0, 7, 2**63]


def left_out(sample: str, from_epoch: int = 0, to_epoch: int | None = None) -> QuarantineRecord:
    return QuarantineRecord(sample, from_epoch, to_epoch, step=12, cause="data", reason="it has 1 NaN")


def order(
    *records: QuarantineRecord,
    ids: Sequence[str] = IDS,
    seed: int = 7,
    path: Path = Path("quarantine.jsonl"),
) -> SampleOrder:
    return SampleOrder(ids, seed=seed, quarantine=Quarantine(path, records))


def place(one: SampleOrder, position: int) -> tuple[int, int]:
    """Epoch and index of the sample at a position."""
    draw = one.get_occurrence(position)
    return draw.epoch, draw.sample_index


def sequence(one: SampleOrder, count: int, first: int = 0) -> list[tuple[int, str]]:
    """(epoch, sample) at each position."""
    placements = [place(one, position) for position in range(first, first + count)]
    return [(epoch, one.ids[index]) for epoch, index in placements]


def epochs(one: SampleOrder, count: int) -> list[list[str]]:
    """The samples of each of the first epochs, in order."""
    epoch_lists: list[list[str]] = [[] for _ in range(count)]
    position = 0
    while (placement := place(one, position))[0] < count:
        epoch_lists[placement[0]].append(one.ids[placement[1]])
        position += 1
    return epoch_lists


@pytest.mark.parametrize("seed", SEEDS)
def test_every_epoch_is_a_permutation_and_no_two_are_alike(seed: int) -> None:
    all_epochs = epochs(order(seed=seed), 100)
    assert all(sorted(epoch) == sorted(IDS) for epoch in all_epochs)
    assert len({tuple(epoch) for epoch in all_epochs[:20]}) == 20
    assert {epoch[0] for epoch in all_epochs} == {*IDS}, "a sample never comes first"


def test_another_seed_gives_another_order_and_the_same_seed_the_same() -> None:
    sequences = [sequence(order(seed=seed), 70) for seed in SEEDS]
    assert len({tuple(drawn_sequence) for drawn_sequence in sequences}) == 3
    assert sequence(order(seed=7), 70) == sequences[1]


def test_the_order_is_of_names_and_not_of_the_places_where_they_stand() -> None:
    """Files that are listed in another order, or beside others, come in the same order."""
    assert sequence(order(ids=IDS[::-1]), 70) == sequence(order(), 70)
    epochs_with_new_sample = epochs(order(ids=["clips/new.mp4", *IDS]), 5)
    assert [[name for name in epoch if name in IDS] for epoch in epochs_with_new_sample] == epochs(order(), 5)


@pytest.mark.parametrize("sample", IDS)
def test_without_a_sample_the_others_keep_their_order_in_all_epochs(sample: str) -> None:
    filtered = epochs(order(left_out(sample)), 8)
    assert filtered == [[name for name in epoch if name != sample] for epoch in epochs(order(), 8)]
    assert [len(epoch) for epoch in filtered] == [6] * 8


@pytest.mark.parametrize("bad", [IDS[:1], [IDS[4]], [IDS[2], IDS[6]]])
def test_a_sample_left_out_where_it_is_first_met_was_never_there(bad: list[str]) -> None:
    """The run trips at its position, leaves it out of that epoch and goes on at the same position."""
    order_without_bad = order(ids=[name for name in IDS if name not in bad])
    run = order()
    num_bad = 0
    drawn_samples: list[tuple[int, str]] = []
    while len(drawn_samples) < 60:
        epoch, index = place(run, len(drawn_samples))
        if IDS[index] in bad:
            run.quarantine.add([left_out(IDS[index], from_epoch=epoch)])
            run.reset()
            num_bad += 1
        else:
            drawn_samples.append((epoch, IDS[index]))
    assert num_bad == len(bad)
    assert drawn_samples == sequence(order_without_bad, 60)
    assert sequence(run, 60) == sequence(order_without_bad, 60)


@pytest.mark.parametrize(
    ("first", "last", "lengths"),
    [
        (2, 2, [7, 7, 6, 7, 7, 7]),
        (1, 3, [7, 6, 6, 6, 7, 7]),
        (0, 0, [6, 7, 7, 7, 7, 7]),
        (3, None, [7, 7, 7, 6, 6, 6]),
        (4, 3, [7, 7, 7, 7, 7, 7]),
    ],
)
def test_a_sample_is_out_from_one_epoch_to_another_both_included(
    first: int, last: int | None, lengths: list[int]
) -> None:
    run = order(left_out(IDS[3], first, last))
    observed = epochs(run, 6)
    assert [len(epoch) for epoch in observed] == lengths
    full_epochs = epochs(order(), 6)
    for number, epoch in enumerate(observed):
        is_out = len(epoch) == 6
        assert run.quarantine.is_copy_quarantined(IDS[3], number) is is_out
        assert not run.quarantine.is_copy_quarantined(IDS[2], number)
        assert epoch == [name for name in full_epochs[number] if not (is_out and name == IDS[3])]


def test_several_records_of_one_sample_add_up() -> None:
    run = order(left_out(IDS[3], 1, 1), left_out(IDS[5], 1, 1), left_out(IDS[3], 3, 3))
    assert [len(epoch) for epoch in epochs(run, 5)] == [7, 5, 7, 6, 7]


def test_positions_are_found_in_any_order_where_epochs_differ_in_length() -> None:
    records = [left_out(IDS[1], 1), left_out(IDS[4], 2, 3), left_out(IDS[6], 4, 4)]
    expected = sequence(order(*records), 40)
    assert [epoch for epoch, _ in expected] == sorted(epoch for epoch, _ in expected)
    assert [[e for e, _ in expected].count(number) for number in range(6)] == [7, 6, 5, 5, 5, 6]
    run = order(*records)
    for position in (39, 0, 12, 13, 6, 7, 25, 38, 5):
        assert sequence(run, 1, first=position) == [expected[position]]


def test_the_order_learns_of_a_longer_quarantine_when_it_forgets() -> None:
    run = order()
    before = sequence(run, 30)
    run.quarantine.add([left_out(IDS[0], from_epoch=2)])
    assert run.get_occurrence(15).epoch == 2
    run.reset()
    assert sequence(run, 30) == sequence(order(left_out(IDS[0], from_epoch=2)), 30)
    assert sequence(run, 14) == before[:14]
    assert sequence(run, 30) != before


def test_an_epoch_without_a_sample_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    run = order(*(left_out(name, 1) for name in IDS), path=path)
    assert len(sequence(run, 7)) == 7
    with pytest.raises(DitLoraError) as error:
        run.get_occurrence(7)
    assert str(error.value) == f"no sample is left: all 7 are in {path}; release some with dit-lora quarantine"


def test_a_sample_is_out_from_its_epoch_and_copy_on() -> None:
    cat, dog = IDS[:2]
    lasting_record = replace(left_out(cat, 2), from_copy=1)
    single_epoch_record = replace(left_out(cat, 1, 1), from_copy=3)
    quarantine = Quarantine(Path("nowhere"), [lasting_record, single_epoch_record])
    assert [quarantine.count_kept_copies(cat, epoch) for epoch in range(5)] == [None, 3, 1, 0, 0]
    assert not quarantine.is_copy_quarantined(cat, 2)
    assert quarantine.is_copy_quarantined(cat, 2, copy=1)
    assert quarantine.is_copy_quarantined(cat, 3)
    assert not quarantine.is_copy_quarantined(cat, 1, copy=2)
    assert quarantine.is_copy_quarantined(cat, 1, copy=3)
    assert not quarantine.is_copy_quarantined(dog, 3)
    quarantine.add([left_out(cat, 2)])
    assert quarantine.count_kept_copies(cat, 2) == 0
    assert quarantine.get_records(cat) == (lasting_record, single_epoch_record, left_out(cat, 2))
    assert quarantine.get_records(dog) == ()


def test_a_list_comes_back_from_its_file(tmp_path: Path) -> None:
    """With names of every alphabet, and a name that is no Unicode."""
    path = tmp_path / "run" / "quarantine.jsonl"
    names = ["кот.mp4", "猫\n.mp4", "caf\udce9.mp4", 'a"b\\c.mp4', *IDS[:2]]
    records = [left_out(name, number, number + 3) for number, name in enumerate(names)]
    records.append(replace(left_out(IDS[0], 7), from_copy=2))
    records.append(replace(left_out("猫\n.mp4"), cause="inputs", reason="a first\nand a second", step=0))
    quarantine = Quarantine(path, iter(records))
    quarantine.save()
    assert Quarantine.load(path).records == records
    assert Quarantine.load(path).path == path
    quarantine.add([left_out("dog", 5)])
    quarantine.save()
    loaded_quarantine = Quarantine.load(path)
    assert loaded_quarantine.records == [*records, left_out("dog", 5)]
    assert loaded_quarantine.is_copy_quarantined("dog", 5)
    assert len(path.read_text().splitlines()) == len(records) + 1
    assert list(path.parent.iterdir()) == [path]


def test_a_list_that_is_not_there_is_empty(tmp_path: Path) -> None:
    quarantine = Quarantine.load(tmp_path / "none.jsonl")
    assert quarantine.records == []
    quarantine.save()
    assert Quarantine.load(tmp_path / "none.jsonl").records == []


GOOD = json.dumps(
    {
        "sample_id": "a",
        "from_epoch": 0,
        "to_epoch": None,
        "step": 3,
        "cause": "data",
        "reason": "x",
    }
)


@pytest.mark.parametrize(
    ("text", "torn"),
    [(f"{GOOD}\n{GOOD[:40]}", 1), (f"{GOOD[:40]}{GOOD}\n{GOOD}\n", 1), (GOOD[:40], 1), (GOOD, 0)],
    ids=["the last", "one that another was written after", "the only", "none"],
)
def test_torn_lines_are_passed_over_and_counted(tmp_path: Path, text: str, torn: int) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_text(text)
    quarantine = Quarantine.load(path)
    assert quarantine.num_torn_lines == torn
    assert [record.sample_id for record in quarantine.records] == (["a"] if text != GOOD[:40] else [])


@pytest.mark.parametrize(
    "text",
    [
        f"{GOOD}\nsample a",
        f"{GOOD}\n[1, 2]",
        GOOD.replace('"step": 3, ', ""),
        GOOD.replace('"step"', '"stop"'),
        "null",
        b"\xff\xfe\x00",
    ],
    ids=["another line", "a list", "a key short", "another key", "null", "no UTF-8"],
)
def test_a_file_that_is_no_list_is_an_error_that_names_it(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DitLoraError) as error:
        Quarantine.load(path)
    assert str(error.value).startswith(f"{path} is not a quarantine list: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["from_epoch", "to_epoch", "from_copy"])
def test_a_file_whose_epochs_or_copies_are_no_numbers_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_text(json.dumps({**json.loads(GOOD), key: "2"}))
    with pytest.raises(DitLoraError, match="is not a quarantine list"):
        Quarantine.load(path)


def test_a_list_of_an_earlier_version_has_no_copies(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_text(GOOD)
    assert Quarantine.load(path).is_copy_quarantined("a", 0, copy=0)


def test_a_released_sample_comes_again_and_others_stay_out(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    quarantine = Quarantine(path, [left_out(IDS[1]), left_out(IDS[2]), left_out(IDS[1], 2, 2)])
    with pytest.raises(DitLoraError, match=r"has no entry for clips/cow\.mp4; its entries are: clips/dog"):
        quarantine.release([IDS[2], "clips/cow.mp4"])
    assert len(quarantine.records) == 3
    assert quarantine.release([IDS[1], IDS[1]]) == [IDS[1]]
    quarantine.save()
    reloaded = Quarantine.load(path)
    assert [record.sample_id for record in reloaded.records] == [IDS[2]]
    assert (reloaded.is_copy_quarantined(IDS[1], 2), reloaded.is_copy_quarantined(IDS[2], 2)) == (False, True)


def test_evidence_goes_with_a_record_and_lists_of_before_have_none(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    record = replace(left_out(IDS[0]), evidence={"control": IDS[3], "replays": {"failed": 3, "of": 3}})
    Quarantine(path, [record]).save()
    assert Quarantine.load(path).records == [record]
    assert f'control: "{IDS[3]}"' in record.describe()
    line = json.loads(path.read_text())
    del line["evidence"]
    path.write_text(json.dumps(line) + "\n")
    assert Quarantine.load(path).records == [replace(record, evidence={})]
    path.write_text(json.dumps({**line, "evidence": "none"}) + "\n")
    with pytest.raises(DitLoraError, match=r"it is damaged: 0\.evidence: Input should be a valid dictionary"):
        Quarantine.load(path)
