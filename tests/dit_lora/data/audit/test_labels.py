"""Labels outside the table are rejected by name, and uneven classes are counted."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from dit_lora.data.audit.labels import check_labels
from dit_lora.data.media.media import MediaFile
from dit_lora.data.sources.clips import Clip


def clips(counts: Mapping[str, int], times: float = 1.0) -> list[Clip]:
    return [
        Clip(f"{label}/{n}.png", MediaFile(Path(f"{label}/{n}.png")), label, times_per_epoch=times)
        for label, count in counts.items()
        for n in range(count)
    ]


def test_every_sample_of_an_unknown_class_is_rejected_with_the_nearest_name() -> None:
    table = ["golden retriever", "tabby cat", "sea snake"]
    findings, _ = check_labels(clips({"GOLDEN_RETRIEVER": 2, "tabby cat": 2, "qqqqq": 1}), table)
    assert set(findings) == {"GOLDEN_RETRIEVER/0.png", "GOLDEN_RETRIEVER/1.png", "qqqqq/0.png"}
    (finding,) = findings["GOLDEN_RETRIEVER/1.png"]
    assert (finding.code, finding.verdict) == ("label_unknown", "reject")
    assert "not among the 3" in finding.message
    assert "nearest is 'golden retriever'" in finding.message
    assert "nearest" not in findings["qqqqq/0.png"][0].message


def test_a_synonym_of_the_table_is_known_and_counts_for_its_class() -> None:
    table = ["tench, Tinca tinca", "goldfish"]
    data = clips({"tench": 1, "Tinca tinca": 1, "tench, Tinca tinca": 1, "goldfish": 1})
    assert check_labels(data, table) == ({}, [])


@pytest.mark.parametrize("table", [None, ["cat"]])
def test_no_class_at_all_is_rejected_with_and_without_a_table(table: list[str] | None) -> None:
    findings, _ = check_labels(clips({" ": 1, "cat": 1}), table)
    assert [finding.message for finding in findings[" /0.png"]] == ["it has no class"]
    assert "cat/0.png" not in findings


def test_classes_far_from_the_median_are_named_once_with_their_counts() -> None:
    """Less than a tenth and more than ten times; exactly a tenth and ten times are balanced."""
    counts = {"small": 1, "tenth": 2, "a": 20, "b": 20, "c": 20, "ten times": 200, "large": 201}
    findings, notes = check_labels(clips(counts), None)
    assert set(findings) == {"small/0.png", "large/0.png"}
    (small,), (large,) = findings["small/0.png"], findings["large/0.png"]
    assert (small.code, small.verdict) == ("label_imbalance", "warn")
    assert "'small' has 1 sample, less than a tenth of the median class's 20" in small.message
    assert "'large' has 201 samples, more than ten times" in large.message
    assert notes == [
        "2 of 7 classes have less than a tenth or more than ten times the median class's 20 samples: "
        "'small' (1), 'large' (201)."
    ]


def test_repeats_even_classes_out() -> None:
    few_clips, many_clips = clips({"few": 2}, times=10), clips({"many": 40, "most": 45})
    assert check_labels([*few_clips, *many_clips], None)[0] == {}
    assert set(check_labels([*clips({"few": 2}), *many_clips], None)[0]) == {"few/0.png"}


def test_classes_without_a_sample_are_a_note_on_the_set() -> None:
    table = [f"class {number}" for number in range(30)]
    findings, notes = check_labels(clips({"class 3": 2}), table)
    assert findings == {}
    (note,) = notes
    assert note.startswith("29 of 30 classes of the table have no sample: class 0, class 1, class 2")
    assert "class 3," not in note
    assert note.endswith("and 9 more.")


def test_no_clips_give_no_findings() -> None:
    assert check_labels([], None) == ({}, [])
