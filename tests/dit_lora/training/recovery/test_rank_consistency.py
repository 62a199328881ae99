"""Ranks whose replicas differ and averages that are none: named, undone, never kept."""

from pathlib import Path

import pytest
import torch
from launching import on_ranks
from runs import lines, same_adapter
from topologies import Case, Engine, Fault, run_all
from verified import SMOKES, quick

from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.guard.diagnosis import Diagnosis
from dit_lora.guard.recovery import Action, Policy
from dit_lora.training.ema import AverageMagnitudeBounds
from dit_lora.training.recovery.rank_consistency import _find_minority_ranks, _find_outlier_rank


def test_one_of_three_is_outvoted_and_two_are_weighed_by_how_far_they_moved() -> None:
    digests = [{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2}]
    assert _find_minority_ranks(digests, ["b"]) == [1]
    assert _find_minority_ranks(digests[:2], ["b"]) == []
    assert _find_outlier_rank([{"b": 0.001}, {"b": 0.5}], ["b"]) == [1]
    assert _find_outlier_rank([{"b": 0.001}, {"b": 0.0015}], ["b"]) == []
    assert _find_outlier_rank([{"b": 0.1, "a": 9.0}, {"b": 0.5, "a": 1.0}], ["a", "b"]) == []


def test_ranks_that_differ_again_at_one_step_are_no_learning_rate() -> None:
    policy = Policy(RecoveryConfig())
    diagnosis = Diagnosis("weights", "differs", step=4, rank=1, evidence={"ranks": [1]})
    assert policy.choose_and_count_action(4, [diagnosis], []) == Action("rollback", should_lower_lr=False)
    second_choice = policy.choose_and_count_action(4, [diagnosis], [])
    assert (second_choice.kind, "continue without that machine" in second_choice.reason) == ("stop", True)


def test_an_average_is_bounded_by_what_its_weight_has_been() -> None:
    """Wherever it is: no limit on values in general would show 5 where the weight stays below 0.1."""
    bounds, weight = AverageMagnitudeBounds(), {"w": torch.tensor([0.1, -0.05]), "zero": torch.zeros(3)}
    bounds.widen_magnitude_bounds(weight, weight)
    now = {"w": torch.tensor([0.01, 0.0]), "zero": torch.zeros(3)}
    assert bounds.find_averages_out_of_bounds(now, weight) == {}
    for bad in (5.0, -5.0, 1e30):
        exceeded = bounds.find_averages_out_of_bounds(now, {"w": torch.tensor([0.1, bad]), "zero": torch.zeros(3)})
        assert exceeded == {"w": (pytest.approx(abs(bad)), pytest.approx(0.1))}
    assert list(bounds.find_averages_out_of_bounds(now, {**now, "zero": torch.tensor([0.0, 0.0, 1e-3])})) == ["zero"]


@pytest.mark.slow
def test_a_rank_with_other_weights_is_named_and_undone(
    tiny_checkpoints: dict[str, Path], shape_clips: Path, tmp_path: Path
) -> None:
    """Finite, and invisible in losses and gradients: weights and moments of one of two ranks, under DDP and ZeRO-2."""

    data = tmp_path / "data"

    def case(name: str, engine: Engine, fault: Fault | None, *more: str) -> Case:
        common = (
            f"model.path={tiny_checkpoints['cogvideox-5b']}",
            "train.steps=4",
            "train.save_every=2",
            "train.keep=9",
            "train.ema=0.9",
            "guard.snapshot_every=2",
            "guard.parity_every=0",
        )
        args = quick(shape_clips, data, *common, *more, f"run.dir={tmp_path / name}")
        return Case(engine, (str(SMOKES / "cogvideox.yaml"), *args), fault)

    cases = {
        "clean": case("clean", "ddp", None),
        "weight": case("weight", "ddp", Fault("weight", 2, 1, adds=0.5)),
        "moment": case("moment", "ddp", Fault("moment", 3, 1, adds=0.5)),
        "zero_clean": case("zero_clean", "zero2", None),
        # Later it would be written over: every step gathers weights anew.
        "zero": case("zero", "zero2", Fault("weight", 4, 1, adds=0.5, kept=True)),
        "frozen": case("frozen", "ddp", Fault("frozen", 4, 1, adds=5.0)),
        "stop": case("stop", "ddp", Fault("weight", 2, 1, adds=0.5), "guard.max_rollbacks=0"),
    }
    ranks = on_ranks(2, run_all, list(cases.values()), timeout=1200)
    results = dict(zip(cases, zip(*ranks, strict=True), strict=True))

    for name, clean in (("weight", "clean"), ("moment", "clean"), ("zero", "zero_clean")):
        assert [result.error for result in results[name]] == ["", ""], name
        (event,) = lines(tmp_path / name, "events.jsonl")
        assert (event["kind"], event["action"], event["step"]) == ("ranks_differ", "rollback", 4)
        assert (event["rank"], event["verdict"]["evidence"]["ranks"]) == (1, [1])
        assert "that rank's memory" in event["verdict"]["words"]
        assert event["verdict"]["module"].startswith("transformer_blocks.0.attn1.to_")
        assert same_adapter(tmp_path / name, tmp_path / clean)
    assert not lines(tmp_path / "clean", "events.jsonl")

    assert [result.exit_code for result in results["stop"]] == [3, 3]
    assert not (tmp_path / "stop" / "adapter").exists()
    assert sorted(path.name for path in (tmp_path / "stop" / "checkpoints").iterdir()) == ["step_000002"]
    # What is frozen is alike in no state: each rank's output is compared with that of the start.
    assert [result.exit_code for result in results["frozen"]] == [1, 1]
    assert "with adapters and kernels off its output on rank 1 (" in results["frozen"][0].error
