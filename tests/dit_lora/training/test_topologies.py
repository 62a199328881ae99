"""The same samples over ranks, micro-steps and engines: the same run, a fault named alike, resumed elsewhere.

Every launch runs recipes/lora.py many times: tests/topologies.py.
"""

import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases.case import as_it_is
from launching import on_ranks
from runs import adapter, lines, poison, same_adapter, without_verification
from safetensors.torch import load_file
from topologies import Case, Engine, Fault, Seen, run_all

from dit_lora.errors import DitLoraError
from dit_lora.guard.gradient_check.directions import WeightDisplacement
from dit_lora.numerics.ranks import get_num_processes, get_process_index

pytestmark = pytest.mark.slow

SAMPLES, STEPS, RATE = 16, 4, 1e-3
"""Samples of a step, which ranks and micro-steps share."""
# Measured over all topologies: losses 3e-8, gradient norms 5e-7. A sum in the mean's place is a gradient norm as many
# times as large as there are ranks.
LOSS, NORM = 1e-6, 5e-6
# Adam divides each element's gradient by its own size, so that rounding shows where that is near zero: single elements
# are held less tightly than the root mean square over all.
ELEMENT, WEIGHTS = 2e-2 * RATE, 2e-4 * RATE
ZERO = importlib.util.find_spec("deepspeed") is not None
TARGET = "02_blue_disc.mp4"
FEW = 4
"""Samples of a step with a fault: of five clips, none is in it twice."""
QUICK = ("guard.parity_every=0",)
"""For all but one healthy run of each engine, which compares kernels after its last step."""


@dataclass
class Table:
    """Runs by name, below one folder, of one tiny checkpoint and its cached clips."""

    folder: Path
    common: tuple[str, ...]
    seen: dict[str, list[Seen]] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def args(self, name: str, ranks: int, accumulate: int, *more: str, samples: int = SAMPLES) -> tuple[str, ...]:
        share = samples // ranks // accumulate
        overrides = (f"train.batch_size={share}", f"train.accumulate={accumulate}")
        return (
            *self.common,
            f"data.cache={self.cache}",
            *overrides,
            *more,
            f"run.dir={self.run(name)}",
        )

    def run(self, name: str) -> Path:
        return self.folder / name

    def checkpoint(self, name: str, step: int) -> Path:
        return self.run(name) / "checkpoints" / f"step_{step:06d}"

    def poisoned(self, tag: str) -> Path:
        """A copy of the cache with one NaN in a clip's latent; one copy per run, since a run marks the entry bad."""
        cache = self.folder / f"poisoned_{tag}"
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(self.cache, cache)
        poison(cache, TARGET)
        return cache

    def launch(self, ranks: int, cases: dict[str, Case], timeout: float = 900) -> None:
        results = on_ranks(ranks, run_all, list(cases.values()), timeout=timeout)
        for index, name in enumerate(cases):
            self.seen[name] = [rank_results[index] for rank_results in results]

    def require_alike(self, name: str, other: str = "one") -> None:
        """Losses, gradient norms of each group, and the adapter, within rounding."""
        for metrics, theirs in zip(self._metrics(name), self._metrics(other), strict=True):
            assert metrics["loss"] == pytest.approx(theirs["loss"], rel=LOSS), name
            norms = theirs["grad_norm_groups"]
            assert metrics["grad_norm_groups"] == pytest.approx(norms, rel=NORM), name
        require_close(adapter(self.run(name)), adapter(self.run(other)))

    def _metrics(self, name: str) -> list[dict[str, Any]]:
        metrics = lines(self.run(name), "metrics.jsonl")
        assert [line["step"] for line in metrics][-1] == STEPS
        return metrics[-2:]  # a resumed run has no more


def require_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=ELEMENT)
    differences = torch.cat([(first[name] - second[name]).flatten() for name in first])
    assert differences.square().mean().sqrt() <= WEIGHTS


@pytest.fixture(scope="module")
def table(
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    lora_main: Callable[[list[str]], None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Table:
    """With the run on one process, which encodes the clips."""
    common = (
        "recipes/smoke/cogvideox.yaml",
        f"model.path={tiny_checkpoints['cogvideox-5b']}",
        f"data.path={shape_clips}",
        "data.height=32",
        "data.width=48",
        f"train.steps={STEPS}",
        "train.save_every=2",
        "train.keep=9",
        f"optim.groups={{adapter: {{lr: {RATE}}}, adapter_b: {{lr: {2 * RATE}}}}}",
        "validation.prompts=[]",
        "validation.eval_draws=0",
        "guard.snapshot_every=1",
    )
    table = Table(tmp_path_factory.mktemp("topologies"), common)
    lora_main(list(table.args("one", 1, 1)))
    return table


def healthy(table: Table, engine: Engine, ranks: int, accumulates: Sequence[int]) -> dict[str, Case]:
    names = {f"{engine}_{ranks}_{count}": count for count in accumulates}
    return {
        name: Case(engine, table.args(name, ranks, count, *(QUICK if count > 1 else ())))
        for name, count in names.items()
    }


FAULTS = ("latent", "frozen", "moment")


def faulty(table: Table, engine: Engine, ranks: int, faults: Sequence[str] = FAULTS) -> dict[str, Case]:
    """One fault a run, on the last rank, and what the run must come to without it."""
    last_rank, tag = ranks - 1, f"{engine}_{ranks}"
    poisoned = (f"data.cache={table.poisoned(tag)}",)
    quarantine_option = (f"guard.quarantine={table.run(f'{tag}_nan_latent') / 'quarantine.jsonl'}",)

    def case(name: str, fault: Fault | None = None, more: tuple[str, ...] = ()) -> Case:
        args = table.args(f"{tag}_{name}", ranks, 1, *QUICK, *more, samples=FEW)
        return Case(engine, args, fault, prepare=without_verification)

    cases = {
        "latent": {
            f"{tag}_nan_latent": case("nan_latent", None, poisoned),
            f"{tag}_without": case("without", None, quarantine_option),
        },
        "frozen": {f"{tag}_nan_frozen": case("nan_frozen", Fault("frozen", 2, last_rank))},
        "moment": {
            f"{tag}_clean": case("clean"),
            f"{tag}_nan_moment": case("nan_moment", Fault("moment", 2, last_rank)),
        },
    }
    return {name: case for fault in faults for name, case in cases[fault].items()}


def resumed(table: Table, engine: Engine, ranks: int, accumulate: int, start: str) -> dict[str, Case]:
    """The second half of a run, from where another was."""
    name = f"{engine}_{ranks}_from_{start}"
    # The first step is checked, if the engine supports that: the bits must be those of the other run.
    checks = ("guard.gradient_every=9",) if engine != "fsdp2" else ()
    more = (*QUICK, f"train.resume={table.checkpoint(start, STEPS // 2)}", *checks)
    return {name: Case(engine, table.args(name, ranks, accumulate, *more), prepare=without_verification)}


def fail_in_gradient_check(patches: pytest.MonkeyPatch) -> None:
    """An error on the last rank while the weights are displaced."""
    without_verification(patches)
    move_to = WeightDisplacement.move_weights_to_position

    def fail(displacement: WeightDisplacement, position: int) -> float:
        predicted = move_to(displacement, position)
        if position == 2 and get_process_index() == get_num_processes() - 1:
            raise TypeError("no such weight")
        return predicted

    patches.setattr(WeightDisplacement, "move_weights_to_position", fail)


def require_whole(table: Table, name: str, ranks: int) -> None:
    """As many processes as asked for, and on each a part of every trained tensor where they are sharded."""
    results = table.seen[name]
    assert len(results) == ranks
    for result in results:
        assert (result.exit_code, result.error) == (0, "")
        assert result.trained == 16
        assert result.sharded == (16 if name.startswith("fsdp2") else 0)


def require_faults_named(table: Table, tag: str, ranks: int, block: int = 0, faults: Sequence[str] = FAULTS) -> None:
    """Names the sample, the weight's module or the moment's, on the rank that has it; recovery is bit-exact.

    `block` has the first moment with values on the last rank.
    """
    last_rank = ranks - 1
    if "latent" in faults:
        (event,) = lines(table.run(f"{tag}_nan_latent"), "events.jsonl")
        assert (event["sample_ids"], event["action"]) == ([TARGET], "quarantine")
        assert event["verdict"]["cause"] == "data"
        require_recovered(table, f"{tag}_nan_latent", f"{tag}_without")
    if "frozen" in faults:
        (event,) = lines(table.run(f"{tag}_nan_frozen"), "events.jsonl")
        assert (event["rank"], event["action"]) == (last_rank, "stop")
        assert event["verdict"]["words"].startswith("the frozen weight patch_embed.proj.weight has 1 NaN")
        assert [result.exit_code for result in table.seen[f"{tag}_nan_frozen"]] == [3] * ranks
    if "moment" in faults:
        (event,) = lines(table.run(f"{tag}_nan_moment"), "events.jsonl")
        assert (event["rank"], event["action"]) == (last_rank, "rollback")
        assert event["verdict"]["cause"] == "optimizer"
        assert event["verdict"]["module"].startswith(f"transformer_blocks.{block}.attn1.")
        require_recovered(table, f"{tag}_nan_moment", f"{tag}_clean")


def require_recovered(table: Table, name: str, other: str) -> None:
    """To the last bit."""
    assert same_adapter(table.run(name), table.run(other))


def require_same_state(table: Table, name: str, other: str) -> None:
    """On each rank the same bits of weights and moments."""
    for result, theirs in zip(table.seen[name], table.seen[other], strict=True):
        assert result.own.keys() == theirs.own.keys()
        assert len(result.own) > result.trained  # weights, and as many moments as this rank has
        assert all(torch.equal(result.own[key], theirs.own[key]) for key in result.own)


@pytest.mark.thorough  # four ranks, above; two, in test_fsdp2.py
def test_two_ranks_with_sharded_weights_train_recover_and_resume_as_one_process(
    table: Table,
) -> None:
    """DDP runs in the same launch."""
    common_overrides = {
        **healthy(table, "ddp", 2, [1]),
        **healthy(table, "fsdp2", 2, [1, 4]),
        **resumed(table, "fsdp2", 2, 1, "fsdp2_2_1"),
        **resumed(table, "fsdp2", 2, 4, "ddp_2_1"),
        **resumed(table, "ddp", 2, 1, "fsdp2_2_4"),
    }
    table.launch(2, common_overrides | faulty(table, "fsdp2", 2))
    for name in common_overrides:
        require_whole(table, name, 2)
        table.require_alike(name)
    require_faults_named(table, "fsdp2_2", 2)
    require_same_state(table, "fsdp2_2_from_fsdp2_2_1", "fsdp2_2_1")
    first_result, second = table.seen["fsdp2_2_1"]
    assert any(not torch.equal(first_result.own[name], second.own[name]) for name in first_result.own)


@pytest.mark.thorough  # four ranks, above; two, in test_zero.py
@pytest.mark.skipif(not ZERO, reason="needs deepspeed")
def test_two_ranks_that_share_the_optimizer_out_train_recover_and_resume_as_one_process(
    table: Table,
) -> None:
    """DeepSpeed's ZeRO-2, from DDP's checkpoint and on to DDP."""
    common_overrides = {
        **({} if "ddp_2_1" in table.seen else healthy(table, "ddp", 2, [1])),
        **healthy(table, "zero2", 2, [1, 4]),
        **resumed(table, "zero2", 2, 1, "zero2_2_1"),
        **resumed(table, "zero2", 2, 4, "ddp_2_1"),
        **resumed(table, "ddp", 2, 1, "zero2_2_4"),
    }
    table.launch(2, common_overrides | faulty(table, "zero2", 2))
    for name in common_overrides:
        require_whole(table, name, 2)
        table.require_alike(name)
    require_faults_named(table, "zero2_2", 2, block=1)
    require_same_state(table, "zero2_2_from_zero2_2_1", "zero2_2_1")


def sharing(table: Table, ranks: int) -> dict[str, Case]:
    """Two ranks a sample: healthy, from DDP's checkpoint, and with faults in what both or the last of them hold."""
    tag, shared = f"context_{ranks}", "train.context_parallel=2"

    def case(name: str, count: int, *more: str, samples: int = SAMPLES, fault: Any = None) -> Case:
        quick = () if name == "1" else QUICK
        args = table.args(f"{tag}_{name}", ranks // 2, count, shared, *quick, *more, samples=samples)
        return Case("ddp", args, fault, prepare=without_verification if quick else as_it_is)

    poisoned = f"data.cache={table.poisoned(tag)}"
    quarantine_option = f"guard.quarantine={table.run(f'{tag}_nan_latent') / 'quarantine.jsonl'}"
    moment, frozen = Fault("moment", 2, ranks - 1), Fault("frozen", 2, ranks - 1)
    return {
        f"{tag}_1": case("1", 1, "train.checkpointing=full"),
        f"{tag}_4": case("4", 4),
        f"{tag}_from_one": case("from_one", 1, f"train.resume={table.checkpoint('one', 2)}"),
        f"{tag}_nan_latent": case("nan_latent", 1, poisoned, samples=FEW),
        f"{tag}_without": case("without", 1, quarantine_option, samples=FEW),
        f"{tag}_clean": case("clean", 1, samples=FEW),
        f"{tag}_nan_moment": case("nan_moment", 1, samples=FEW, fault=moment),
        f"{tag}_nan_frozen": case("nan_frozen", 1, samples=FEW, fault=frozen),
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks_that_share_each_samples_tokens_train_and_recover_as_one_process(table: Table, ranks: int) -> None:
    """Context parallelism, with and without data parallelism."""
    table.launch(ranks, sharing(table, ranks))
    tag = f"context_{ranks}"
    for name in (f"{tag}_1", f"{tag}_4", f"{tag}_from_one"):
        require_whole(table, name, ranks)
        # Attention over a share of the heads rounds otherwise: 3e-6 was seen, where a step moves a weight by 2e-3.
        table.require_alike(name)
    require_faults_named(table, tag, ranks)
    assert lines(table.run(f"{tag}_1"), "metrics.jsonl")[-1]["samples"] == SAMPLES * STEPS


@pytest.mark.thorough  # four processes
def test_what_four_ranks_wrote_goes_on_on_two(table: Table) -> None:
    table.launch(4, healthy(table, "fsdp2", 4, [1]))
    cases = resumed(table, "fsdp2", 2, 1, "fsdp2_4_1")
    table.launch(2, cases)
    for name in cases:
        require_whole(table, name, 2)
        table.require_alike(name)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_every_topology_is_the_same_run(table: Table, ranks: int) -> None:
    """Each engine, each split into micro-steps, faults on the last rank too."""
    engines: list[Engine] = ["ddp", "fsdp2", *(["zero2"] if ZERO else [])]
    common_overrides = {}
    for engine in engines:
        common_overrides |= healthy(table, engine, ranks, [1, 4])
        common_overrides |= resumed(table, engine, ranks, 1, f"{engine}_{ranks}_1")
    cases = dict(common_overrides)
    (case,) = resumed(table, "ddp", ranks, 1, f"ddp_{ranks}_1").values()
    args = (*case.args[:-1], f"run.dir={table.run('failing_check')}")
    cases["failing_check"] = replace(case, args=args, prepare=fail_in_gradient_check)
    # DDP on two ranks recovers above, where the two share each sample's tokens.
    engines_with_faults = [engine for engine in engines if ranks > 2 or engine != "ddp"]
    # ZeRO-2 has weights and samples as DDP has; only its moments are a part on each rank.
    faults = {engine: ("moment",) if ranks == 2 and engine == "zero2" else FAULTS for engine in engines_with_faults}
    for engine in engines_with_faults:
        cases |= faulty(table, engine, ranks, faults[engine])
    for case in cases.values():
        shutil.rmtree(case.folder, ignore_errors=True)  # of the tests above
    table.launch(ranks, cases, timeout=1800)
    for name in common_overrides:
        require_whole(table, name, ranks)
        table.require_alike(name)
    for engine in engines:
        name = f"{engine}_{ranks}_1"
        require_same_state(table, f"{engine}_{ranks}_from_{name}", name)
        resumed_run = table.run(f"{engine}_{ranks}_from_{name}")
        phases = json.loads((resumed_run / "phases.json").read_text())
        assert ("gradient check" in str(phases)) is (engine != "fsdp2")
        assert not any(event["kind"] == "gradient_check" for event in lines(resumed_run, "events.jsonl"))
    require_same_state(table, "failing_check", f"ddp_{ranks}_1")
    (event,) = lines(table.run("failing_check"), "events.jsonl")
    assert event["verdict"]["words"].endswith("against the loss: TypeError: no such weight")
    for engine in engines_with_faults:
        # The first block's parameters are among the first ranks' parts of ZeRO's flat groups.
        require_faults_named(table, f"{engine}_{ranks}", ranks, int(engine == "zero2"), faults[engine])


@pytest.mark.thorough
def test_what_runs_beside_the_loop_is_the_same_with_sharded_weights(table: Table) -> None:
    """Averages, checkpointing, statistics, eval loss, samples, adaptive clip; and every weight trained."""
    extra_overrides = (
        "train.ema=0.9",
        "train.checkpointing=full",
        "validation.prompts=[a red disc]",
        "validation.inference_steps=2",
        "validation.eval_draws=3",
        "validation.every=2",
        "guard.monitor_every=1",
        "guard.spike_threshold=8",
        "guard.adaptive_clip=true",
    )
    full = ("train.mode=full", "lora={}", "optim.groups={backbone: {lr: 1.0e-3}}", "train.ema=0.9")
    cases = {
        f"{engine}_{name}": Case(engine, table.args(f"{engine}_{name}", 2, 2, *more))
        for engine in ("ddp", "fsdp2")
        for name, more in (("beside", extra_overrides), ("full", full))
    }
    table.launch(2, cases, timeout=1200)
    for name in cases:
        assert [result.error for result in table.seen[name]] == ["", ""]
    ddp_run, fsdp2_run = table.run("ddp_beside"), table.run("fsdp2_beside")
    table.require_alike("fsdp2_beside", "ddp_beside")
    losses = [[h["eval_loss"] for h in lines(run, "eval_loss.jsonl")] for run in (fsdp2_run, ddp_run)]
    assert losses[0] == pytest.approx(losses[1], rel=LOSS)
    for metrics, theirs in zip(lines(fsdp2_run, "metrics.jsonl"), lines(ddp_run, "metrics.jsonl"), strict=True):
        assert metrics["modules"].keys() == theirs["modules"].keys()
        for module, values in metrics["modules"].items():
            assert values == pytest.approx(theirs["modules"][module], rel=2e-3), module
    assert [p.name for p in sorted(fsdp2_run.rglob("*.mp4"))] == ["prompt_00.mp4"] * 3
    weights = [
        load_file(table.run(name) / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
        for name in ("fsdp2_full", "ddp_full")
    ]
    require_close(*weights)


def test_what_sharded_weights_cannot_do_is_refused_by_name(
    table: Table, lora_main: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is made: one process, FSDP 1, offloading, and options that read whole weights."""
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    refused = {
        ("one process", ()): {},
        ("set fsdp_version: 2", ()): {"FSDP_VERSION": "1"},
        ("fsdp_offload_params", ()): {"FSDP_OFFLOAD_PARAMS": "true"},
        ("train.offload=group: set it to none", ("train.offload=group",)): {},
        ("model.quantize=int8: set it to None", ("model.quantize=int8",)): {},
    }
    for (message, more), changed in refused.items():
        args = [*table.args("refused", 1, 1), "train.checkpointing=auto", *more]
        with monkeypatch.context() as patch:
            for name, value in (environment | changed).items():
                patch.setenv(name, value)
            with pytest.raises(DitLoraError, match=message):
                lora_main(args)
    assert not table.run("refused").exists()
