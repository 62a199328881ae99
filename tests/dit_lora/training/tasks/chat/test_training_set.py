"""Conversations as a run reads them: one kind a step, weights by answer tokens, frames by chance, faults named."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_sets import WATCH, reading, recipe_of, records, set_of, turns, write_records

from dit_lora.config.load import parse_recipe
from dit_lora.data.chat.frames import read_frames_at, sample_frame_times
from dit_lora.data.chat.rendered import IGNORE_INDEX
from dit_lora.data.loading.batch import LOSS_WEIGHT, Batch, make_sample_seed
from dit_lora.data.loading.quarantine import QuarantineRecord
from dit_lora.data.synthetic.conversations import write_conversations
from dit_lora.training.tasks.chat.training_set import ChatTrainingSet, make_sample_generator


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media") / "data"
    write_conversations(folder, clips=3, images=2, frames=12, height=48, width=64, fps=8)
    return folder


@pytest.fixture
def tiny(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["videochat2-mistral"]


@pytest.fixture
def clips(media: Path, tiny: Path, tmp_path: Path) -> ChatTrainingSet:
    more = {"video": "clips/02_blue_disc_right.mp4", "QA": [{"q": "What is it?", "a": "A disc."}]}
    return set_of(recipe_of(tiny, write_records(media, [*records(), more]), tmp_path))


def kind_of(sample: str) -> str:
    return sample.partition("/")[0] if "/" in sample else "text"


def steps(clips: ChatTrainingSet, tmp_path: Path, **how: int) -> list[Batch]:
    return list(clips.make_loader(reading(tmp_path, **how)))


def test_a_step_has_one_kind_and_one_shape_on_all_ranks(clips: ChatTrainingSet, tmp_path: Path) -> None:
    ranks = [steps(clips, tmp_path, accumulate=2, rank=rank, ranks=2) for rank in (0, 1)]
    shapes = {entry.id: entry.shape for entry in clips.entries}
    recorded = []
    for step in range(12):
        micro = [micro_batch for rank in ranks for micro_batch in rank[2 * step : 2 * step + 2]]
        samples = [sample for micro_batch in micro for sample in micro_batch.ids]
        assert len(samples) == 8
        assert len({shapes[sample] for sample in samples}) == 1
        assert len({tuple((n, t.shape) for n, t in micro_batch.tensors.items()) for micro_batch in micro}) == 1
        recorded.append(kind_of(samples[0]))
    assert set(recorded) == {"clips", "images", "text"}


def test_every_bucket_has_tensors_of_its_own_shape(clips: ChatTrainingSet) -> None:
    for entry in clips.entries:
        tensors = clips.read_sample(entry, 0).tensors
        assert tensors["input_ids"].shape == (1, entry.shape.length)
        assert (tensors["labels"] != IGNORE_INDEX).sum() == entry.answers
        pixels = {"clips": (1, 4, 3, 32, 32), "images": (1, 1, 3, 32, 32), "text": None}
        expected = pixels[kind_of(entry.id)]
        assert ("pixels" in tensors) == (expected is not None)
        if expected:
            assert tensors["pixels"].shape == expected
            assert tensors["pixels"].dtype is torch.uint8
        assert ("seconds" in tensors) == (kind_of(entry.id) == "clips")
    shape, spec = clips.largest_shape
    assert shape.volume == max(entry.shape.volume for entry in clips.entries)
    largest = next(entry for entry in clips.entries if entry.shape == shape)
    expected = clips.read_sample(largest, 0).tensors
    assert {n: (t[0].shape, t.dtype) for n, t in expected.items()} == spec


def test_a_bucket_has_room_for_its_longest_answer_wherever_it_stands(media: Path, tiny: Path, tmp_path: Path) -> None:
    answers = ["No, it is not.", "Yes, it is, and it always was and will be.", "No."]
    raw_records = [{"messages": turns(f"Is it {number}?", text)} for number, text in enumerate(answers)]
    clips = set_of(recipe_of(tiny, write_records(media, raw_records), tmp_path, length_step=256))
    assert len(clips.padded_lengths) == 1
    for entry in clips.entries:
        labels = clips.read_sample(entry, 0).tensors["labels"]
        assert labels.shape == (1, clips.entries[1].answers)
        assert (labels != IGNORE_INDEX).sum() == entry.answers


def test_frames_are_of_the_part_that_is_asked_about(media: Path, tiny: Path, tmp_path: Path) -> None:
    part = {"start": 0.5, "end": 1.0, "QA": [{"q": "What?", "a": "It."}]}
    path = write_records(media, [{"video": "clips/00_red_disc_right.mp4", **part}])
    clips = set_of(recipe_of(tiny, path, tmp_path))
    (entry,) = clips.entries
    assert clips.read_sample(entry, 0).tensors["seconds"][0].tolist() == [0.5, 0.625, 0.75, 0.875]
    for draw in range(4):
        seconds = clips.read_augmented(entry, draw, 1).tensors["seconds"]
        assert seconds.min() >= 0.5
        assert seconds.max() < 1


@pytest.mark.parametrize("split", [(4, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)])
def test_a_steps_mean_of_weighted_losses_is_the_mean_over_its_answer_tokens(
    clips: ChatTrainingSet, tmp_path: Path, split: tuple[int, int, int]
) -> None:
    """However ranks and micro-steps share it out; token losses are made up, one number each."""
    size, accumulate, ranks = split
    read = [steps(clips, tmp_path, size=size, accumulate=accumulate, rank=rank, ranks=ranks) for rank in range(ranks)]
    counts = set()
    for step in range(12):
        weighted, tokens = [], []
        for rank in read:
            for batch in rank[accumulate * step : accumulate * (step + 1)]:
                labels = batch.tensors["labels"]
                made_up = torch.sin(labels.double() + 1)
                learned = labels != IGNORE_INDEX
                means = (made_up * learned).sum(1) / learned.sum(1)
                weighted.append((means * batch.tensors[LOSS_WEIGHT]).mean())
                tokens.append(made_up[learned])
                counts |= set(learned.sum(1).tolist())
        torch.testing.assert_close(torch.stack(weighted).mean(), torch.cat(tokens).mean(), rtol=1e-6, atol=0)
    assert len(counts) > 2


def test_a_sources_weight_and_times_are_its_samples(media: Path, tiny: Path, tmp_path: Path) -> None:
    first_file = write_records(media, [{"messages": turns("One?", "Uno.")}], "one.json")
    two = write_records(media, [{"messages": turns("Two?", "Dos, or two.")}], "two.json")
    values = json.loads(recipe_of(tiny, first_file, tmp_path).model_dump_json())
    sources = [{"path": str(first_file), "repeats": 3}, {"path": str(two), "loss_weight": 0.25}]
    values["data"] |= {"path": None, "sources": sources}
    clips = set_of(parse_recipe(values, "test"))
    batches = steps(clips, tmp_path, size=4, steps=6)
    counts = Counter(sample for batch in batches for sample in batch.ids)
    names = sorted(counts)
    assert [counts[name] for name in names] == [18, 6]
    answers = {entry.id: entry.answers for entry in clips.entries}
    for batch in batches:
        tokens = sum(answers[sample] for sample in batch.ids)
        for sample, weight in zip(batch.ids, batch.tensors[LOSS_WEIGHT].tolist(), strict=True):
            factor = 0.25 if sample == names[1] else 1.0
            assert weight == pytest.approx(factor * answers[sample] * 4 / tokens)


def test_a_sample_is_whole_and_from_the_middle_and_a_draw_is_by_chance(clips: ChatTrainingSet) -> None:
    entry = clips.entries[0]
    header, media = entry.header, entry.conversation.media
    assert header is not None
    assert media is not None
    assert header.seconds is not None
    assert header.fps is not None
    middle = sample_frame_times(header.seconds, header.fps, 4)
    full_sample = clips.read_sample(entry, 0)
    expected = read_frames_at(media, middle, height=32, width=32, fit="stretch")
    assert torch.equal(full_sample.tensors["pixels"][0], expected)
    assert full_sample.tensors["seconds"][0].tolist() == pytest.approx(list(middle))
    assert same(clips.read_sample(entry, 5), full_sample)

    draws = [clips.read_augmented(entry, draw, 1) for draw in range(8)]
    assert same(clips.read_augmented(entry, 3, 1), draws[3])
    assert len({tuple(sample.tensors["seconds"][0].tolist()) for sample in draws}) > 4
    for sample_draw in draws:  # the words are of the frames that are seen
        seconds = sample_draw.tensors["seconds"][0].tolist()
        listed = ", ".join(str(round(second, 1)) for second in seconds)
        ids = [i for i in sample_draw.tensors["input_ids"][0].tolist() if i < len(clips.checkpoint.tokenizer)]
        assert f"sampled at {listed} seconds" in clips.checkpoint.tokenizer.decode(ids)
        frames = read_frames_at(media, seconds, height=32, width=32, fit="stretch")
        assert torch.equal(sample_draw.tensors["pixels"][0], frames)
    assert not same(clips.read_augmented(entry, 3, 2), draws[3])


def same(one: Batch, other: Batch) -> bool:
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors
    )


def test_middle_frames_are_trained_on_where_the_recipe_says_so(clips: ChatTrainingSet) -> None:
    entry = clips.entries[1]  # of one turn
    fixed = replace(clips, chat=clips.chat.model_copy(update={"frames": "middle"}))
    assert same(fixed.read_augmented(entry, 1, 1), clips.read_sample(entry, 0))


def test_crops_are_drawn_in_training_alone(clips: ChatTrainingSet) -> None:
    update = {"frames": "middle", "crop": 0.3}
    cropped = replace(clips, chat=clips.chat.model_copy(update=update))
    for entry in (clips.entries[1], clips.entries[2]):
        full_sample = clips.read_sample(entry, 0).tensors["pixels"]
        assert torch.equal(cropped.read_sample(entry, 0).tensors["pixels"], full_sample)
        draws = [cropped.read_augmented(entry, draw, 1).tensors["pixels"] for draw in range(4)]
        assert all(not torch.equal(pixels, full_sample) for pixels in draws)
        assert not torch.equal(draws[0], draws[1])


def test_every_draw_of_a_sample_learns_the_same_tokens(clips: ChatTrainingSet) -> None:
    entry = clips.entries[0]
    assert WATCH in entry.conversation.turns[1].instruction
    orders, learned = set(), set()
    for draw in range(20):
        labels = clips.read_augmented(entry, draw, 1).tensors["labels"][0]
        orders.add(tuple(labels.tolist()))
        learned.add(tuple(sorted(labels.tolist())))
    assert len(orders) == 6  # of three turns
    assert len(learned) == 1


def test_a_draw_is_the_samples_and_the_epochs_not_its_places(clips: ChatTrainingSet, tmp_path: Path) -> None:
    (batch, *_) = steps(clips, tmp_path, size=1)
    (name,) = batch.ids
    entry = next(candidate for candidate in clips.entries if candidate.id == name)
    assert batch.sample_seeds == (make_sample_seed(name, 0),)
    repeated = clips.read_augmented(entry, batch.sample_seeds[0], 3)
    assert all(torch.equal(batch.tensors[key], repeated.tensors[key]) for key in repeated.tensors)


def test_workers_read_the_same(clips: ChatTrainingSet, tmp_path: Path) -> None:
    in_process, read = (steps(clips, tmp_path, steps=5, workers=workers) for workers in (0, 2))
    assert [batch.ids for batch in in_process] == [batch.ids for batch in read]
    assert all(same(a, b) for a, b in zip(in_process, read, strict=True))


def test_a_clip_that_breaks_is_the_fault_of_its_sample(media: Path, tiny: Path, tmp_path: Path) -> None:
    broken = media / "clips" / "broken.mp4"
    broken.write_bytes((media / "clips" / "00_red_disc_right.mp4").read_bytes())
    raw_records = [
        {"video": f"clips/{n}", "QA": [{"q": "What?", "a": "It."}]} for n in (broken.name, "01_green_disc_left.mp4")
    ]
    clips = set_of(recipe_of(tiny, write_records(media, raw_records), tmp_path))
    data = broken.read_bytes()
    broken.write_bytes(data[: len(data) // 2])
    (batch, *_) = steps(clips, tmp_path, steps=1)
    broken.unlink()
    assert set(batch.faults) == {"clips/broken.mp4"}
    assert "broken.mp4: cannot be decoded" in batch.faults["clips/broken.mp4"]
    row = batch.ids.index("clips/broken.mp4")
    assert not batch.tensors["pixels"][row].any()
    assert batch.tensors["pixels"][1 - row].any()
    missing = clips.read_sample(clips.entries[0], 0)  # and one that is not there at all
    assert set(missing.faults) == {"clips/broken.mp4"}
    assert same_shapes(missing, clips.read_sample(clips.entries[1], 0))


def same_shapes(one: Batch, other: Batch) -> bool:
    return {n: t.shape for n, t in one.tensors.items()} == {n: t.shape for n, t in other.tensors.items()}


def test_weights_are_of_the_samples_that_come_once_others_are_left_out(clips: ChatTrainingSet, tmp_path: Path) -> None:
    read_options = reading(tmp_path)
    before = list(clips.make_loader(read_options))
    left_out = before[0].ids[0]
    read_options.quarantine.add([QuarantineRecord(left_out, 0, None, 0, "data", "broken")])
    after = list(clips.make_loader(read_options))
    assert left_out not in {sample for batch in after for sample in batch.ids}
    assert [step_batch.ids for step_batch in before] != [step_batch.ids for step_batch in after]
    for batch in after:
        answers = (batch.tensors["labels"] != IGNORE_INDEX).sum(1)
        torch.testing.assert_close(batch.tensors[LOSS_WEIGHT], 2 * answers / answers.sum())


def test_seeds_draw_differently() -> None:
    first_draw, other_draw = (torch.rand(3, generator=make_sample_generator(seed, 7)) for seed in (1, 2))
    assert not torch.equal(first_draw, other_draw)
    assert torch.equal(first_draw, torch.rand(3, generator=make_sample_generator(1, 7)))
