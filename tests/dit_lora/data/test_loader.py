"""Which sample comes when: a function of seed and position, whatever the split."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dit_lora.data.cache import TensorCache
from dit_lora.data.loader import (
    Batch,
    CachedClips,
    ClipDataset,
    Entry,
    PositionSampler,
    build_loader,
    collate,
    draw_number,
)
from dit_lora.data.quarantine import LeftOut, Order, Quarantine
from dit_lora.errors import DitLoraError


@pytest.fixture
def clips(tmp_path: Path) -> CachedClips:
    videos, texts = TensorCache(tmp_path / "v"), TensorCache(tmp_path / "t")
    texts.write("empty", {"prompt_embeds": torch.zeros(2, 3)}, sample="", facts={})
    entries = []
    for k in range(5):
        videos.write(f"v{k}", {"latent_mean": torch.full((2, 2), float(k))}, sample="", facts={})
        texts.write(f"t{k}", {"prompt_embeds": torch.full((2, 3), k + 1.0)}, sample="", facts={})
        entries.append(Entry(f"{k}.mp4", f"v{k}", f"t{k}"))
    return CachedClips(tuple(entries), "empty", videos, texts)


def of(
    clips: CachedClips,
    seed: int = 0,
    caption_dropout: float = 0.0,
    quarantine: Quarantine | None = None,
) -> ClipDataset:
    quarantine = quarantine or Quarantine(Path("nowhere"))
    return ClipDataset(clips, seed=seed, caption_dropout=caption_dropout, quarantine=quarantine)


def ids_of(dataset: ClipDataset, positions: Iterable[int]) -> list[str]:
    return [dataset.clip_at(position)[1].id for position in positions]


def positions(**values: int) -> list[list[int]]:
    return list(PositionSampler(**{"start_step": 0, "rank": 0, "ranks": 1, **values}))


def flat(lists: list[list]) -> list:
    return [item for one in lists for item in one]


def test_a_steps_samples_do_not_depend_on_its_split() -> None:
    """batch 4 x 1, batch 1 x 4, two ranks x 2, two ranks x 1 x 2: the same four samples."""
    whole = positions(steps=3, batch_size=4, accumulate=1)
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    micro = positions(steps=3, batch_size=1, accumulate=4)
    assert [flat(micro[4 * s : 4 * s + 4]) for s in range(3)] == whole
    for batch_size, accumulate in ((2, 1), (1, 2)):
        ranks = [
            positions(steps=3, batch_size=batch_size, accumulate=accumulate, rank=rank, ranks=2)
            for rank in (0, 1)
        ]
        for step in range(3):
            here = slice(step * accumulate, (step + 1) * accumulate)
            assert sorted(flat(ranks[0][here] + ranks[1][here])) == whole[step]


def test_resuming_goes_on_where_it_stopped() -> None:
    whole = positions(steps=20, batch_size=2, accumulate=3)
    assert positions(start_step=7, steps=20, batch_size=2, accumulate=3) == whole[7 * 3 :]


def test_every_epoch_is_another_permutation_of_all_clips(clips: CachedClips) -> None:
    epochs = [ids_of(of(clips), range(5 * e, 5 * e + 5)) for e in range(6)]
    assert all(sorted(epoch) == [f"{k}.mp4" for k in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 2
    assert [of(clips).clip_at(p)[0] for p in range(30)] == [p // 5 for p in range(30)]
    assert ids_of(of(clips), reversed(range(30))) == flat(epochs)[::-1]
    assert ids_of(of(clips, seed=1), range(30)) != flat(epochs)


def test_a_batch_spans_two_epochs_and_keeps_rows_apart(clips: CachedClips) -> None:
    dataset = of(clips)
    sampler = PositionSampler(start_step=0, steps=3, batch_size=3, accumulate=1, rank=0, ranks=1)
    batches = list(build_loader(dataset, sampler, workers=0, pin_memory=False))
    batch = batches[1]  # positions 3, 4, 5
    assert batch.draws == tuple(map(draw_number, batch.ids, (0, 0, 1)))
    for row, sample in enumerate(batch.ids):
        k = float(sample.removesuffix(".mp4"))
        assert (batch.tensors["latent_mean"][row] == k).all()
        assert (batch.tensors["prompt_embeds"][row] == k + 1).all()
    assert not batch.faults


def test_workers_give_the_same_batches(clips: CachedClips) -> None:
    def ids(workers: int) -> list[tuple[tuple[str, ...], list[float]]]:
        dataset = of(clips, seed=3, caption_dropout=0.5)
        sampler = PositionSampler(
            start_step=1, steps=6, batch_size=2, accumulate=2, rank=0, ranks=1
        )
        loader = build_loader(dataset, sampler, workers=workers, pin_memory=False)
        return [(b.ids, b.tensors["prompt_embeds"][:, 0, 0].tolist()) for b in loader]

    assert ids(0) == ids(2)


def test_reading_ahead_leaves_the_global_generator_alone(clips: CachedClips) -> None:
    dataset = of(clips, seed=3, caption_dropout=0.5)
    sampler = PositionSampler(start_step=0, steps=3, batch_size=1, accumulate=1, rank=0, ranks=1)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(build_loader(dataset, sampler, workers=0, pin_memory=False))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_captions_drop_at_the_asked_rate(clips: CachedClips, share: float) -> None:
    dataset = of(clips, caption_dropout=share)
    dropped = sum(not dataset[p].tensors["prompt_embeds"].any() for p in range(400)) / 400
    assert abs(dropped - share) < 0.08  # over three standard deviations


def test_which_captions_drop_depends_on_the_seed(clips: CachedClips) -> None:
    def pattern(seed: int) -> list[bool]:
        dataset = of(clips, seed=seed, caption_dropout=0.5)
        return [not dataset[p].tensors["prompt_embeds"].any() for p in range(40)]

    assert pattern(0) == pattern(0)
    assert pattern(0) != pattern(1)


def test_an_empty_caption_that_goes_bad_is_no_samples_fault(clips: CachedClips) -> None:
    dataset = of(clips, caption_dropout=1.0)
    path = clips.texts.path("empty")
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    sample = dataset[0]
    assert not sample.faults
    assert not sample.tensors["prompt_embeds"].any()
    assert clips.texts.read("empty", {})[1]  # it is bad
    assert clips.set_aside_bad(sample.ids) == []


def test_an_unreadable_first_entry_does_not_hide_the_others(clips: CachedClips) -> None:
    path = clips.videos.path("v0")
    path.write_bytes(b"")
    dataset = of(clips)
    faults = [fault for p in range(5) for fault in dataset[p].faults]
    assert faults == ["0.mp4"]
    assert clips.set_aside_bad(["0.mp4"]) == [path.with_suffix(".bad")]


def test_a_bad_entry_is_a_fault_of_its_sample_alone(clips: CachedClips) -> None:
    path = clips.videos.path("v2")
    path.write_bytes(path.read_bytes()[:50])
    dataset = of(clips)
    sampler = PositionSampler(start_step=0, steps=1, batch_size=5, accumulate=1, rank=0, ranks=1)
    batch: Batch = next(iter(build_loader(dataset, sampler, workers=0, pin_memory=False)))
    assert list(batch.faults) == ["2.mp4"]
    row = batch.ids.index("2.mp4")
    assert batch.tensors["latent_mean"][row].isnan().all()
    assert batch.tensors["latent_mean"].isnan().sum() == 4
    assert clips.set_aside_bad(["2.mp4", "3.mp4"]) == [path.with_suffix(".bad")]


def left_out(sample: str, first: int = 0, last: int | None = None) -> LeftOut:
    return LeftOut(sample, first, last, step=1, cause="data", reason="bad")


def test_leaving_a_sample_out_changes_neither_the_others_order_nor_their_draws(
    clips: CachedClips,
) -> None:
    """As if the folder never had it, whatever is left out of it."""
    out = Quarantine(Path("nowhere"), [left_out("2.mp4")])
    without = of(clips, caption_dropout=0.5, quarantine=out)
    rest = [entry for entry in clips.entries if entry.id != "2.mp4"]
    never = of(CachedClips(tuple(rest), "empty", clips.videos, clips.texts), caption_dropout=0.5)
    for position in range(40):
        one, other = without[position], never[position]
        assert (one.ids, one.draws) == (other.ids, other.draws)
        assert torch.equal(one.tensors["prompt_embeds"], other.tensors["prompt_embeds"])
    everyone = ids_of(of(clips), range(50))
    assert ids_of(without, range(40)) == [sample for sample in everyone if sample != "2.mp4"]


def test_a_sample_that_is_out_for_one_epoch_is_back_in_the_next(clips: CachedClips) -> None:
    once = Quarantine(Path("nowhere"), [left_out("1.mp4", 1, 1), left_out("3.mp4", 2)])
    dataset = of(clips, quarantine=once)
    sizes = [5, 4, 4, 4]
    placed = [dataset.clip_at(position) for position in range(sum(sizes))]
    by_epoch = [sorted(entry.id for e, entry in placed if e == epoch) for epoch in range(4)]
    assert list(map(len, by_epoch)) == sizes
    missing = [{f"{k}.mp4" for k in range(5)} - set(one) for one in by_epoch]
    assert missing == [set(), {"1.mp4"}, {"3.mp4"}, {"3.mp4"}]


def test_draws_differ_between_samples_and_epochs_and_not_between_splits(clips: CachedClips) -> None:
    draws = [of(clips)[position].draws[0] for position in range(15)]
    assert len(set(draws)) == 15
    assert draws == [of(clips)[position].draws[0] for position in range(15)]


def test_an_order_counts_anew_when_the_quarantine_grew() -> None:
    quarantine = Quarantine(Path("nowhere"))
    order = Order(["a", "b", "c"], seed=0, quarantine=quarantine)
    assert [order.at(p)[0] for p in range(6)] == [0, 0, 0, 1, 1, 1]
    quarantine.add([left_out("b")])
    order.forget()
    assert [order.at(p)[0] for p in range(6)] == [0, 0, 1, 1, 2, 2]
    assert {order.ids[order.at(p)[1]] for p in range(6)} == {"a", "c"}
    quarantine.add([left_out("a", 1), left_out("c", 1)])
    order.forget()
    with pytest.raises(DitLoraError, match="no sample is left: all 3 are in nowhere"):
        order.at(2)


def test_a_quarantine_reads_back_what_it_saved(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    assert Quarantine.load(path).records == []
    kept = Quarantine(path, [left_out("a", 1, 1), left_out("b", 2)])
    kept.save()
    assert Quarantine.load(path).records == kept.records
    path.write_text('{"sample": "a"}\n')
    with pytest.raises(DitLoraError, match="is not a quarantine list"):
        Quarantine.load(path)


def test_one_sample_of_a_batch_keeps_its_row_draw_and_fault(clips: CachedClips) -> None:
    batch = collate([of(clips)[position] for position in range(3)])
    batch = replace(batch, faults={batch.ids[1]: "torn"})
    one, other = batch.single(1), batch.single(2)
    assert (one.ids, one.draws, one.faults) == (batch.ids[1:2], batch.draws[1:2], batch.faults)
    assert torch.equal(one.tensors["latent_mean"], batch.tensors["latent_mean"][1:2])
    assert not other.faults


def test_mirror_images_come_in_half_of_the_draws_by_sample_and_epoch(clips: CachedClips) -> None:
    for k in range(5):
        tensors = {"latent_mean": torch.full((2, 2), 100.0 + k)}
        clips.videos.write(f"m{k}", tensors, sample="", facts={})
    entries = tuple(replace(e, mirror_key=f"m{k}") for k, e in enumerate(clips.entries))
    dataset = of(replace(clips, entries=entries))
    shown = [dataset[position].tensors["latent_mean"].max().item() for position in range(400)]
    assert 0.4 < sum(value >= 100 for value in shown) / 400 < 0.6
    assert {value % 100 for value in shown} == {0, 1, 2, 3, 4}
    assert shown == [
        dataset[position].tensors["latent_mean"].max().item() for position in range(400)
    ]
    path = clips.videos.path("m2")
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    assert dataset.clips.set_aside_bad(["2.mp4"]) == [path.with_suffix(".bad")]
