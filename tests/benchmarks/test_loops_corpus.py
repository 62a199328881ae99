"""A share of the corpus of training loops, and planted violations that its checks must find."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, launch_environment

from benchmarks.loops.causes import GuardReport, compare_causes, guard_messages
from benchmarks.loops.composer.compose import compose_scripts
from benchmarks.loops.composer.plan import PARTS, draw_plan
from benchmarks.loops.driver import Driver, Selection, select, select_share
from benchmarks.loops.guard_command import FOLDER
from benchmarks.loops.loop_file import FAULTS, find_loops
from benchmarks.loops.processes import run_bare
from benchmarks.loops.saved_files import find_saved_files, read_saved_file

SAMPLE = {"planted": "sample", "index": 5}
GRADIENT = {"planted": "gradient", "name": "0.weight"}
MOMENT = {"planted": "moment", "name": "0.weight", "state": "exp_avg"}


def everything(_name: str) -> bool:
    return True


# --- The corpus ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "healthy_share", "min_faulty_runs"), [(40, 12, 20), pytest.param(6, 1, 150, marks=pytest.mark.thorough)]
)
def test_a_share_of_the_faults_and_of_the_loops_has_no_failure(
    share: int, healthy_share: int, min_faulty_runs: int, tmp_path: Path
) -> None:
    process = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.loops", "run", "--json", "rows.json"),
            *("--share", str(share), "--healthy-share", str(healthy_share)),
        ],
        cwd=tmp_path,
        env={**launch_environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len({(row["loop"], row["fault"]) for row in rows if row["fault"]}) > min_faulty_runs
    assert process.returncode == 0, process.stdout[-20_000:]


def test_the_corpus_has_enough_loops_in_small_folders() -> None:
    loops = find_loops()
    assert len(loops) >= 66
    folders = Counter(loop.path.parent for loop in loops)
    assert max(folders.values()) <= 25
    assert sum(len(loop.faults) * len(loop.guards) for loop in loops) >= 400


@pytest.mark.parametrize("share", [3, 12, 40])
def test_every_loop_fault_and_way_of_guarding_is_in_each_share(share: int) -> None:
    full_corpus = select(find_loops(), everything, everything)
    selections = select_share(full_corpus, share)
    assert [item.loop for item in selections] == [item.loop for item in full_corpus]
    assert {fault for item in selections for fault in item.faults} == set(FAULTS)
    assert {guard for item in selections for guard in item.guards if item.faults} == {
        *("command", "watch", "attach", "callback")
    }
    num_faults = [sum(len(item.faults) for item in items) for items in (selections, full_corpus)]
    assert num_faults[0] == pytest.approx(num_faults[1] / share, rel=0.1)
    # Fewer of the loops in which no fault is chosen.
    healthy, fewer = (
        [item.loop for item in items if not item.faults] for items in (selections, select_share(full_corpus, share, 3))
    )
    assert fewer == healthy[::3]


# --- Composed loops ------------------------------------------------------------------------------


def test_equal_seeds_compose_equal_scripts() -> None:
    scripts = compose_scripts(7, 30)
    assert scripts == compose_scripts(7, 30)
    assert list(scripts.items())[:10] == list(compose_scripts(7, 10).items())
    assert set(scripts.values()).isdisjoint(compose_scripts(8, 30).values())
    for name, text in scripts.items():
        compile(text, name, "exec")


def test_every_part_is_drawn() -> None:
    generator = random.Random(0)
    plans = [draw_plan(generator) for _ in range(1500)]
    for kind, parts in PARTS.items():
        assert {getattr(plan, kind) for plan in plans} == set(parts), kind


# --- Checks of names -----------------------------------------------------------------------------


def event(
    words: str = "", samples: Sequence[str] = (), cause: str = "unknown", **evidence: list[str]
) -> dict[str, Any]:
    verdict = {"cause": cause, "words": words, "evidence": evidence}
    return {"step": 1, "sample_ids": list(samples), "verdict": verdict}


def compare(planted: dict[str, Any], *events: dict[str, Any], stderr: str = "") -> str:
    report = GuardReport(events, guard_messages(stderr))
    return compare_causes([planted], report, ("queue",))[0]


@pytest.mark.parametrize(
    ("planted", "events", "stderr", "naming"),
    [
        (SAMPLE, [event("has 1 NaN", ["dataset index 5"], "data")], "", "named"),
        (SAMPLE, [event("has 1 NaN", ["dataset index 6"], "data")], "", "wrong"),
        (SAMPLE, [event("", ["dataset index 5", "dataset index 6"], "data")], "", "wrong"),
        (SAMPLE, [event("", ["dataset index 5 (index 3 of the Subset)"], "data")], "", "named"),
        (SAMPLE, [event("", ["dataset index 3 or dataset index 5"], "data")], "", "named"),
        (SAMPLE, [event("", ["dataset index 3 or dataset index 4"], "data")], "", "wrong"),
        (SAMPLE, [event("", ["dataset index None"], "data")], "", "wrong"),
        (SAMPLE, [event("", ["path images/0005.png"], "data")], "", "named"),
        (SAMPLE, [event("", ["path images/0006.png"], "data")], "", "wrong"),
        (SAMPLE, [event("", ["row 1 of micro-batch 0"], "data")], "", "unknown"),
        (SAMPLE, [], "guard: skipped\n  - dataset index 15 (1x)\n", "wrong"),
        (SAMPLE, [], "guard: skipped\n  - dataset index 5: argument 0\n", "named"),
        (SAMPLE, [], "guard: row 1 of micro-batch 0; its dataset index is not known", "unknown"),
        (SAMPLE, [event("memory is damaged", cause="weights")], "", "wrong"),
        (SAMPLE, [event("buffer queue has 3 NaN", cause="weights")], "", "unknown"),
        (SAMPLE, [event("finite when run again", cause="transient")], "", "wrong"),
        (SAMPLE, [], "", "unknown"),
        (GRADIENT, [event("the gradient of 0.weight was not finite")], "", "named"),
        (GRADIENT, [event("the gradient of 10.weight was not finite")], "", "unknown"),
        (GRADIENT, [event(gradients=["module.0.weight"])], "", "named"),
        (GRADIENT, [event(gradients=["2.weight", "2.bias"])], "", "wrong"),
        (GRADIENT, [event("the gradient of 0.weight", ["row 1 of micro-batch 0"])], "", "wrong"),
        (GRADIENT, [event("0.weight/exp_avg has 1 NaN", cause="optimizer")], "", "wrong"),
        (MOMENT, [event("0.weight/exp_avg has 1 NaN", cause="optimizer")], "", "named"),
        (MOMENT, [event("0.weight has 1 NaN", cause="weights")], "", "unknown"),
        (MOMENT, [event("2.weight has 1 NaN", cause="weights")], "", "wrong"),
        ({"planted": "loss"}, [event("the loop's own loss is NaN", cause="loss")], "", "named"),
        ({"planted": "loss"}, [event("output gradient has NaN", cause="data")], "", "wrong"),
        ({"planted": "loss"}, [event("non finite loss")], "", "unknown"),
        ({"planted": "state", "name": "hidden"}, [event("argument hidden has NaN")], "", "named"),
        ({"planted": "empty"}, [event("the batch is empty")], "", "named"),
        ({"planted": "empty"}, [event("", ["dataset index 3"], "data")], "", "wrong"),
    ],
)
def test_a_named_cause_is_compared_with_the_planted_one(
    planted: dict[str, Any], events: list[dict[str, Any]], stderr: str, naming: str
) -> None:
    assert compare(planted, *events, stderr=stderr) == naming


@pytest.mark.parametrize(("bad_rows", "naming"), [({1, 2}, "unknown"), ({2}, "wrong"), ((), "unknown")])
def test_a_numbered_row_must_be_a_bad_one(bad_rows: Collection[int], naming: str) -> None:
    report = GuardReport([event("has 1 NaN", ["row 1 of micro-batch 0"], "data")], [])
    assert compare_causes([SAMPLE], report, bad_rows=bad_rows)[0] == naming


# --- Checks of files -----------------------------------------------------------------------------


class Outer(torch.nn.Module):
    """Pickled under a module name that the reader of files cannot import."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)


Outer.__module__ = "__main__"


def test_tensors_are_found_in_whole_models_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "Outer", Outer, raising=False)
    model = Outer()
    with torch.no_grad():
        model.inner.weight[0, 1] = float("nan")
    torch.save({"models": [model], "epoch": 3}, tmp_path / "model.pt")
    (name,) = read_saved_file(tmp_path / "model.pt").nonfinite
    assert name.endswith("inner/_parameters/weight")


def test_archives_are_compared_by_their_content(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3), "b": torch.arange(2)}
    torch.save(weights, tmp_path / "one.pt")
    torch.save(weights, tmp_path / "other.pt")  # the archive has the file's name in it
    weights["a"][1].neg_()
    torch.save(weights, tmp_path / "third.pt")
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04")
    files = find_saved_files(tmp_path)
    assert files["one.pt"].digest != files["other.pt"].digest
    assert files["one.pt"].equals(files["other.pt"])
    assert not files["one.pt"].equals(files["third.pt"])
    assert files["broken.pt"].problem


# --- Planted guards ------------------------------------------------------------------------------


def edit_weights(edit: Callable[[torch.Tensor], None]) -> None:
    """Change the saved weights, as a guard that does harm would."""
    path = Path("model.pt")
    if path.exists():
        weights = torch.load(path)
        edit(weights["0.weight"])
        torch.save(weights, path)


def write_event(samples: Sequence[str], cause: str = "data", words: str = "has 1 NaN") -> None:
    Path(FOLDER).mkdir(exist_ok=True)
    record = event(words, samples, cause)
    (Path(FOLDER) / "events.jsonl").write_text(json.dumps(record) + "\n")


def planted_fault() -> str:
    return json.loads(os.environ["LOOP_FAULT"])["fault"]


def perfect(script: str, arguments: Sequence[str]) -> None:
    """Do what a guard should: files are finite, and the planted sample is named."""
    run_bare(script, arguments)
    if planted_fault():
        edit_weights(lambda weight: weight.nan_to_num_())
        weights = torch.load("model.pt")
        torch.save({name: value.nan_to_num() for name, value in weights.items()}, "model.pt")
    if planted_fault() == "nan_sample":
        write_event(["dataset index 5"])


def absent(script: str, arguments: Sequence[str]) -> None:
    run_bare(script, arguments)


def flips_a_bit(script: str, arguments: Sequence[str]) -> None:
    run_bare(script, arguments)
    edit_weights(lambda weight: weight.view(torch.int32)[0, 0].bitwise_xor_(1))


def names_another(script: str, arguments: Sequence[str]) -> None:
    perfect(script, arguments)
    if planted_fault():
        write_event(["dataset index 6"])


def accuses_weights(script: str, arguments: Sequence[str]) -> None:
    perfect(script, arguments)
    if planted_fault():
        write_event([], "weights", "the checkpoint or memory is damaged")


def ends_the_script(script: str, arguments: Sequence[str]) -> None:
    perfect(script, arguments)
    sys.exit(3)


def loses_a_file(script: str, arguments: Sequence[str]) -> None:
    perfect(script, arguments)
    Path("model.pt").unlink()


def adds_a_file(script: str, arguments: Sequence[str]) -> None:
    perfect(script, arguments)
    Path("snapshot.bin").write_text("")


def spoils_weights(script: str, arguments: Sequence[str]) -> None:
    perfect(script, arguments)
    edit_weights(lambda weight: weight.fill_(float("inf")))


def speaks_of_the_file(script: str, arguments: Sequence[str]) -> None:
    run_bare(script, arguments)
    if planted_fault():
        sys.stderr.write("guard: torch.save: model.pt: 0.weight has 24 NaN\n")


def talks(script: str, arguments: Sequence[str]) -> None:
    perfect(script, arguments)
    sys.stderr.write("guard: watching AdamW\nguard: everything is fine\n")
    write_event([], "unknown")


def prints(script: str, arguments: Sequence[str]) -> None:
    perfect(script, arguments)
    sys.stdout.write("one line more\n")


FAKES = {
    fake.__name__: fake
    for fake in (
        *(perfect, absent, flips_a_bit, names_another, accuses_weights, ends_the_script),
        *(loses_a_file, adds_a_file, spoils_weights, speaks_of_the_file, talks, prints),
    )
}
LOOP = "plain/own_nan_skip"
"""It survives a bad sample by itself, so that a guard can make it worse; it does not survive a bad gradient."""


def check_fakes() -> dict[str, list[dict[str, Any]]]:
    """Run one loop with every fake guard; called in a process that has not run autograd."""
    (loop,) = find_loops(LOOP)
    rows = {}
    for name, fake in FAKES.items():
        driver = Driver(num_jobs=1, run_guarded=fake)
        driver.run([Selection(loop, ["nan_sample", "inf_gradient"], ["command"])])
        rows[name] = [row.as_record() for row in driver.rows]
    return rows


@pytest.fixture(scope="module")
def fake_rows() -> dict[str, list[dict[str, Any]]]:
    code = "import json, test_loops_corpus as t; print(json.dumps(t.check_fakes()))"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**launch_environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("fake", "failures"),
    [
        ("perfect", set()),
        ("absent", {("inf_gradient", "silent files")}),
        ("flips_a_bit", {("", "files"), ("inf_gradient", "silent files")}),
        ("names_another", {("nan_sample", "names"), ("inf_gradient", "names")}),
        ("accuses_weights", {("nan_sample", "names"), ("inf_gradient", "names")}),
        ("ends_the_script", {(f, "exit code") for f in ("", "nan_sample", "inf_gradient")}),
        (
            "loses_a_file",
            {("", "files"), ("nan_sample", "file names"), ("inf_gradient", "file names")},
        ),
        (
            "adds_a_file",
            {("", "files"), ("nan_sample", "file names"), ("inf_gradient", "file names")},
        ),
        (
            "spoils_weights",
            {
                *(("", "files"), ("nan_sample", "weights"), ("nan_sample", "silent files")),
                ("inf_gradient", "silent files"),
            },
        ),
        ("speaks_of_the_file", set()),
        ("talks", {("", "events"), ("", "messages")}),
        ("prints", {("", "stdout")}),
    ],
)
def test_a_planted_violation_is_found(
    fake_rows: dict[str, list[dict[str, Any]]], fake: str, failures: set[tuple[str, str]]
) -> None:
    rows = fake_rows[fake]
    failed_checks = {(row["fault"], row["check"]) for row in rows if not row["is_ok"]}
    assert failed_checks == failures, [row for row in rows if not row["is_ok"]]


def test_the_perfect_guard_names_the_sample(
    fake_rows: dict[str, list[dict[str, Any]]],
) -> None:
    namings = {row["fault"]: row["naming"] for row in fake_rows["perfect"] if row["naming"]}
    assert namings == {"nan_sample": "named", "inf_gradient": "unknown"}
