"""A bad sample is named by its index in the dataset only where the tensor that failed is proven to be its own."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from loop_helpers import fresh_accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data.dataloader import default_collate

from dit_lora.guard.attach.guard import Guard

Named = list[tuple[str, list[str]]]
COUNT = 12


class Rows(Dataset[torch.Tensor]):
    """Twelve rows of five values, with NaN in some."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.randn(5, generator=torch.Generator().manual_seed(index))
        if index in self.bad:
            row[2] = torch.nan
        return row


class RowStream(IterableDataset[torch.Tensor]):
    """The same rows, one after the other."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(Rows(4).__getitem__, range(COUNT))


def train(
    batches: Callable[[], Iterable[Any]],
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    epochs: int = 1,
    model: nn.Module | None = None,
) -> Named:
    """Train a plain loop; returns the cause and the named samples of each failed step."""
    torch.manual_seed(0)
    model = nn.Linear(5, 2) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard.watch(model, optimizer)
    for _ in range(epochs):
        for x in batches():
            optimizer.zero_grad()
            model(change(x)).square().mean().backward()
            optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return [(event["verdict"]["cause"], event["sample_ids"]) for event in guard.events]


def numbered(named: Named) -> bool:
    """True if samples are told by the numbers of their rows only."""
    names = [name for _, names in named for name in names]
    return bool(names) and all(name.startswith("row ") for name in names)


FIVE = ("data", ["dataset index 5"])


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"num_workers": 2, "prefetch_factor": 3, "shuffle": True},
        {"num_workers": 1, "persistent_workers": True},
        {"shuffle": True, "drop_last": True, "batch_size": 5},
    ],
    ids=["shuffled", "workers that read ahead", "a worker that persists", "uneven"],
)
def test_an_item_is_named_in_every_epoch(options: dict[str, Any]) -> None:
    loader = DataLoader(Rows(5), **{"batch_size": 3, **options})
    epochs = 3
    recorded: list[bool] = []

    def batches() -> Iterator[torch.Tensor]:
        for x in loader:
            recorded.append(bool(x.isnan().any()))
            yield x

    assert train(batches, epochs=epochs) == [FIVE] * sum(recorded)
    assert sum(recorded) >= epochs - 1


def test_items_of_a_loader_that_is_cycled_are_named_though_its_iterator_has_ended() -> None:
    def cycled() -> Iterator[torch.Tensor]:
        return itertools.islice(itertools.cycle(DataLoader(Rows(5), batch_size=3)), 12)

    assert train(cycled) == [FIVE] * 3


def read_ahead(batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """As prefetchers do: the next batch is taken, and changed, before this one is used."""
    iterator = iter(batches)
    next_batch = next(iterator)
    for following in iterator:
        ready, next_batch = next_batch, following
        yield ready
    yield next_batch


def test_batches_that_are_kept_reversed_and_read_ahead_are_named_by_their_tensors() -> None:
    def loader() -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(5), batch_size=3, shuffle=True)

    assert train(lambda: reversed(list(loader()))) == [FIVE]
    assert train(lambda: list(loader()), epochs=2) == [FIVE] * 2
    assert train(lambda: read_ahead(loader())) == [FIVE]
    # Changed and out of order, nothing proves whose row it is.
    assert numbered(train(lambda: reversed([x * 0.5 for x in loader()])))


@pytest.mark.parametrize("order", [lambda x: x[[2, 0, 1]], lambda x: x.roll(1, 0), lambda x: x.flip(0)])
def test_rows_that_the_loop_permutes_are_named_by_their_content(
    order: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def loader() -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(5), batch_size=3, shuffle=True)

    assert train(loader, order) == [FIVE]
    # The item was bad as it was loaded, and as many rows are bad as items.
    assert train(loader, lambda x: order(x) * 0.5) == [FIVE]


def test_a_row_that_the_loop_spoils_is_not_a_bad_item_of_its_batch() -> None:
    def spoil(x: torch.Tensor) -> torch.Tensor:
        x = x * 0.5
        if x.isnan().any():
            x[(~x.isfinite()).any(1).nonzero().item() - 1, 0] = torch.inf  # another row
        return x

    (event,) = train(lambda: DataLoader(Rows(5), batch_size=3), spoil)
    assert event == ("inputs", ["row 1 of micro-batch 0", "row 2 of micro-batch 0"])
    only_spoiled = train(
        lambda: DataLoader(Rows(), batch_size=6),
        lambda x: x.index_fill(0, torch.tensor(4), torch.inf),
    )
    assert only_spoiled == [("inputs", ["row 4 of micro-batch 0"])] * 2


def test_rows_that_the_loop_overwrites_in_place_are_no_items_any_more() -> None:
    def overwrite(x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            x[2] = 0.0
            x[1, 0] = torch.nan
        return x

    (event,) = train(lambda: DataLoader(Rows(5), batch_size=3), overwrite)
    assert event == ("inputs", ["row 1 of micro-batch 0"])


def test_two_bad_items_of_a_batch_are_both_named(caplog: pytest.LogCaptureFixture) -> None:
    def loader() -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(3, 5), batch_size=6)

    names = ["dataset index 3", "dataset index 5"]
    assert train(loader) == [("data", names)]
    expected = "; ".join(f"{name}: argument 0 has 1 NaN among 5 values" for name in names)
    assert f"\n  - {expected}" in caplog.text  # each of them once
    assert train(loader, lambda x: x.flip(0) * 0.5) == [("data", names)]


def test_items_with_the_same_content_are_not_told_apart_by_it() -> None:
    class Repeated(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index % 6)

    assert train(lambda: DataLoader(Repeated(4), batch_size=3)) == [
        ("data", ["dataset index 4"]),
        ("data", ["dataset index 10"]),
    ]
    # As copies their content is that of two items; both are bad as they were loaded.
    verdicts = train(lambda: list(DataLoader(Repeated(4), batch_size=12)), lambda x: x.flip(0))
    assert verdicts == [("data", ["dataset index 4", "dataset index 10"])]


def test_an_item_of_a_subset_is_named_by_both_indices() -> None:
    subset = Subset(Rows(5), [0, 2, 4, 5, 6, 8])
    (event,) = train(lambda: DataLoader(subset, batch_size=3))
    assert event == ("data", ["dataset index 5 (index 3 of the Subset)"])


def test_items_of_a_stream_have_no_index() -> None:
    events = train(lambda: DataLoader(RowStream(), batch_size=3), epochs=2)
    assert events == [("inputs", ["row 1 of micro-batch 0"])] * 2


def sorted_by_value(items: list[torch.Tensor]) -> torch.Tensor:
    items.sort(key=lambda row: float(row[0]))  # in place, as for packed sequences
    return torch.stack(items)


def without_the_first(items: list[torch.Tensor]) -> torch.Tensor:
    return default_collate(items[1:])


def with_a_copy_for_the_last(items: list[torch.Tensor]) -> torch.Tensor:
    return default_collate([*items[:-1], items[0].clone()])


def padded(items: list[torch.Tensor]) -> torch.Tensor:
    longest = max(len(item) for item in items) + 3
    return torch.stack([nn.functional.pad(item, (0, longest - len(item))) for item in items])


def scaled(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items) / 7


@pytest.mark.parametrize(
    ("collate", "bad", "expected"),
    [
        (sorted_by_value, 5, [FIVE]),
        (without_the_first, 5, [FIVE]),
        (without_the_first, 3, []),
        (with_a_copy_for_the_last, 5, []),
        (padded, 5, [FIVE]),
    ],
)
def test_rows_of_a_batch_that_is_collated_by_the_loop_are_named_by_their_content(
    collate: Callable[[list[torch.Tensor]], torch.Tensor],
    bad: int,
    expected: Named,
) -> None:
    model = nn.Linear(8, 2) if collate is padded else None
    loader = DataLoader(Rows(bad), batch_size=3, collate_fn=collate)
    assert train(lambda: loader, model=model) == expected


def test_a_copy_in_the_place_of_another_item_has_the_name_of_what_it_copies_or_none() -> None:
    loader = DataLoader(Rows(3), batch_size=3, collate_fn=with_a_copy_for_the_last)
    ((cause, names),) = train(lambda: loader)
    assert (cause, names) in (
        ("data", ["dataset index 3"]),
        ("inputs", ["row 0 of micro-batch 0", "row 2 of micro-batch 0"]),
    )


def test_rows_that_the_collate_function_computes_are_numbered() -> None:
    loader = DataLoader(Rows(5), batch_size=3, collate_fn=scaled)
    assert train(lambda: loader) == [("inputs", ["row 2 of micro-batch 0"])]


class Joined(Dataset[torch.Tensor]):
    """Graphs of one to four nodes, with NaN in a node of one of them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        nodes = torch.randn(1 + index % 4, 5, generator=torch.Generator().manual_seed(index))
        if index == 5:
            nodes[1, 2] = torch.nan
        return nodes


def test_parts_that_are_joined_are_named_by_their_item() -> None:
    loader = DataLoader(Joined(), batch_size=4, collate_fn=torch.cat)
    assert train(lambda: loader) == [FIVE]


GRID = torch.tensor([[1, 2, 2]])
IMAGE = 7
"""The token that stands for a patch of a picture."""


class VisionModel(nn.Module):
    """Takes the patches of all pictures in one tensor, as Qwen2.5-VL does, and refuses what does not add up."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.patches, self.out = nn.Embedding(8, 4), nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor,
        image_grid_thw: torch.Tensor,
        mm_token_type_ids: torch.Tensor,
    ) -> torch.Tensor:
        if int(image_grid_thw.prod(1).sum()) != len(pixel_values):
            raise ValueError("grids and patches do not fit")
        is_patch = (mm_token_type_ids == 1)[..., None]
        patches = self.patches(pixel_values.sqrt())  # which fails for negative values
        hidden = self.tokens(input_ids).masked_scatter(is_patch, patches)
        return self.out(hidden.cumsum(1)[:, -1])


class Pictures(Dataset[dict[str, torch.Tensor]]):
    """Two or one pictures of four patches each, and text."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        count = 1 + index % 2
        draws = torch.Generator().manual_seed(index)
        pixels = torch.rand(4 * count, 3, generator=draws)
        if index == 3:
            pixels[6, 1] = self.value
        text = torch.randint(0, IMAGE, (12 - 4 * count,), generator=draws)
        ids = torch.cat([torch.full((4 * count,), IMAGE), text])
        return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": GRID.repeat(count, 1)}


def collate_pictures(items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([item["input_ids"] for item in items])
    media_tensors = {name: torch.cat([item[name] for item in items]) for name in ("pixel_values", "image_grid_thw")}
    return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **media_tensors}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.nan, ("data", ["dataset index 3"])),
        # That the model fails for a finite one shows when samples are run alone: that names a row.
        (-0.5, ("inputs", ["row 0 of micro-batch 0"])),
    ],
)
def test_samples_are_told_apart_by_the_grids_of_their_patches(value: float, expected: tuple[str, list[str]]) -> None:
    torch.manual_seed(0)
    model = VisionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard.watch(model, optimizer)
    for _ in range(2):
        for batch in DataLoader(Pictures(value), batch_size=3, collate_fn=collate_pictures):
            optimizer.zero_grad()
            model(**batch).square().mean().backward()
            optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    # The second batch holds items 3 to 5.
    assert [event["step"] for event in guard.events] == [2, 4]
    causes = [(event["verdict"]["cause"], event["sample_ids"]) for event in guard.events]
    assert causes == [expected] * 2


class Normed(nn.Module):
    """Needs several samples at once, and is NaN for all of them if one is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.out = nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.enter(x.sqrt())))


def test_a_model_that_cannot_run_one_sample_is_asked_without_it() -> None:
    class Positive(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index).abs() * (-1 if index == 5 else 1)

    events = train(lambda: DataLoader(Positive(), batch_size=4), model=Normed())
    assert events == [("inputs", ["dataset index 5"])]


@pytest.mark.parametrize("breaks_off", [False, True])
def test_accelerates_batches_are_named_after_an_epoch_was_broken_off(breaks_off: bool) -> None:
    """Accelerate fetches a batch ahead, which the loop never gets if it ends an epoch early."""
    accelerator = fresh_accelerator()
    torch.manual_seed(1)
    plain = nn.Linear(5, 2)
    model, optimizer, loader = accelerator.prepare(
        plain,
        torch.optim.SGD(plain.parameters(), lr=1e-3),
        DataLoader(Rows(2, 6, 9), batch_size=2, shuffle=True),
    )
    guard = Guard.attach(accelerator, model, optimizer)
    bad_steps = 0
    for _ in range(6):
        for number, x in enumerate(loader):
            bad_steps += bool(x.isnan().any())
            optimizer.zero_grad()
            accelerator.backward(model(x * 0.5).square().mean())
            optimizer.step()
            if breaks_off and number == 3:
                break
    names = {name for event in guard.events for name in event["sample_ids"]}
    assert names <= {"dataset index 2", "dataset index 6", "dataset index 9"}
    assert [event["verdict"]["cause"] for event in guard.events] == ["data"] * bad_steps


def test_memory_that_is_used_again_does_not_make_a_row_a_carried_state() -> None:
    """The loop's own tensors come to lie where outputs of the same size have been."""
    events = train(
        lambda: DataLoader(RowStream(), batch_size=3),
        lambda x: x * 0.5,
        epochs=30,
        model=nn.Linear(5, 5),
    )
    assert events == [("inputs", ["row 1 of micro-batch 0"])] * 30


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 3)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.cell(x, hidden)


def test_state_that_the_loop_carries_over_is_told_and_names_no_sample_of_the_next_batch() -> None:
    torch.manual_seed(0)
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard.watch(model, optimizer)
    hidden = torch.zeros(3, 3)
    for x in DataLoader(Rows(5), batch_size=3):
        optimizer.zero_grad()
        hidden = model(x, hidden.detach())
        hidden.square().mean().backward()
        optimizer.step()
    first_event, *later_events = guard.events
    assert (first_event["step"], first_event["sample_ids"]) == (2, ["dataset index 5"])
    assert [event["step"] for event in later_events] == [3, 4]
    for event in later_events:
        assert event["sample_ids"] == []
        assert event["verdict"]["cause"] == "unknown"
        assert "it was carried over from an earlier call" in event["verdict"]["words"]
