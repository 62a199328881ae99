"""The audit's files say what was found, whole, and can be read by strict readers."""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from dit_lora.data.audit.finding import AuditedSample, Finding
from dit_lora.data.audit.summary import (
    build_audit_json,
    compute_totals,
    merge_audits,
    write_fix_list,
    write_json,
)

BLACK = Finding("black", "all 9 frames are black", "reject", "remove it")
LONG = Finding("caption_long", "300 tokens", "warn", "shorten it")
EMPTY = Finding("caption_empty", "its caption is empty", "reject", "write one")
CUT = Finding("hard_cut", "a cut at 2 s", "warn", "split the clip")

JUDGED = [
    AuditedSample("cats/a.mp4", (), {"fps": 24}),
    AuditedSample("cats/b.mp4", (LONG, CUT)),
    AuditedSample("c.mp4", (BLACK, LONG)),
    AuditedSample("d.mp4", (LONG,)),
]


def strict(path: Path) -> dict:
    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_totals_count_samples_by_verdict_and_code() -> None:
    assert compute_totals(JUDGED) == {
        "samples": 4,
        "ok": 1,
        "warn": 2,
        "reject": 1,
        "codes": {"caption_long": 3, "black": 1, "hard_cut": 1},
    }
    samples = [AuditedSample("a", (LONG, Finding("caption_long", "again", "warn")))]
    assert compute_totals(samples)["codes"] == {"caption_long": 1}, "samples are counted, not findings"
    assert compute_totals([]) == {"samples": 0, "ok": 0, "warn": 0, "reject": 0, "codes": {}}


def test_json_has_the_documented_shape(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    write_json(path, build_audit_json(JUDGED))
    record = strict(path)
    assert list(record) == ["samples", "totals"]
    assert record["samples"][0] == {
        "file": "cats/a.mp4",
        "verdict": "ok",
        "reasons": [],
        "verdicts": [],
        "codes": [],
        "facts": {"fps": 24},
    }
    assert record["samples"][2]["verdict"] == "reject"
    assert record["samples"][2]["reasons"] == [
        "black: all 9 frames are black",
        "caption_long: 300 tokens",
    ]
    assert record["samples"][2]["codes"] == ["black", "caption_long"]
    assert record["totals"] == compute_totals(JUDGED)
    assert record == build_audit_json(JUDGED)
    write_json(path, build_audit_json([]))
    assert strict(path) == {"samples": [], "totals": compute_totals([])}


def test_json_is_strict_whatever_was_measured(tmp_path: Path) -> None:
    facts = {
        "nan": math.nan,
        "inf": [-math.inf, {"deep": np.float32("nan")}],
        "rate": Fraction(30000, 1001),
        "narrow": np.float32(0.5),
        "count": np.int64(7),
        "flag": True,
        "path": Path("a/b"),
        3: ("tuple",),
    }
    path = tmp_path / "audit.json"
    samples = [AuditedSample("\udcff.mp4", (), facts)]
    write_json(path, build_audit_json(samples, encoded={"latent": {"abs_max": math.inf}}))
    record = strict(path)
    assert record["samples"][0]["file"] == "\udcff.mp4", "a name that is not UTF-8 comes back"
    assert record["samples"][0]["facts"] == {
        "nan": None,
        "inf": [None, {"deep": None}],
        "rate": pytest.approx(29.97, abs=1e-3),
        "narrow": 0.5,
        "count": 7,
        "flag": True,
        "path": "a/b",
        "3": ["tuple"],
    }
    assert record["encoded"] == {"latent": {"abs_max": None}}


def test_notes_and_other_parts_are_there_only_where_there_are_some() -> None:
    report = build_audit_json(JUDGED, notes=["no cats"], buckets={"advice": []}, encoded={})
    assert list(report) == ["samples", "totals", "notes", "buckets"]
    assert report["notes"] == ["no cats"]


def test_the_fix_list_has_one_line_a_sample_that_is_not_ok_rejects_first(tmp_path: Path) -> None:
    path = tmp_path / "fix.tsv"
    write_fix_list(path, JUDGED)
    assert path.read_text(encoding="utf-8").split("\n") == [
        "verdict\tfile\treason\twhat to do",
        "reject\tc.mp4\tblack: all 9 frames are black; caption_long: 300 tokens\tremove it; shorten it",
        "warn\tcats/b.mp4\tcaption_long: 300 tokens; hard_cut: a cut at 2 s\tshorten it; split the clip",
        "warn\td.mp4\tcaption_long: 300 tokens\tshorten it",
        "",
    ]


def test_names_and_captions_cannot_break_the_fix_list_or_a_terminal(tmp_path: Path) -> None:
    name = "a\tb\nc\\d\x1b[2J\u202egpj\u2028.mp4"
    path = tmp_path / "fix.tsv"
    write_fix_list(path, [AuditedSample(name, (Finding("black", "x\r\ny \u732b \udcff", "reject"),))])
    text = path.read_text(encoding="utf-8")
    _, line, _ = text.split("\n")
    assert line.split("\t") == [
        "reject",
        r"a\tb\nc\\d\x1b[2J\u202egpj\u2028.mp4",
        "black: x\\r\\ny \u732b \\udcff",
        "",
    ]
    assert len(text.splitlines()) == 2


def test_parts_are_merged_by_sample_in_the_order_of_the_media() -> None:
    picture = b"jpeg"
    media = [AuditedSample("b", (LONG,), {"fps": 24}, picture), AuditedSample("a")]
    merged = merge_audits(
        media,
        {"a": [EMPTY], "b": [BLACK, LONG]},
        {"gone": [Finding("missing", "listed but not there", "reject")]},
        facts={"b": {"caption_tokens": 300}, "unheard of": {"fps": 1}},
    )
    assert [sample.file for sample in merged] == ["b", "a", "gone"]
    assert merged[0].findings == (BLACK, LONG), "worst first, and the same finding once"
    assert merged[0].facts == {"fps": 24, "caption_tokens": 300}
    assert merged[0].thumbnail == picture
    assert [sample.verdict for sample in merged] == ["reject"] * 3
    assert media[0].facts == {"fps": 24}, "what was given is left alone"


def test_a_sample_judged_in_two_parts_is_one() -> None:
    merged = merge_audits(
        [
            AuditedSample("a", (LONG,), {"fps": 24}),
            AuditedSample("a", (BLACK,), {"seconds": 2}, b"j"),
        ]
    )
    assert merged == [AuditedSample("a", (BLACK, LONG), {"fps": 24, "seconds": 2}, b"j")]
