"""What a run says where its data cannot be read on."""

import re
from collections.abc import Iterator

import pytest

from dit_lora.data.loading.batch import MicroBatchReader


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), r"\(pid 7\)"),
        (ConnectionResetError(104, "Connection reset by peer"), r".*\(Connection reset by peer\)"),
        (EOFError(), r".*\(EOFError\)"),
    ],
)
def test_a_worker_that_died_is_named_whichever_sign_of_it_comes_first(error: Exception, said: str) -> None:
    """Where a batch was on its way, its connection breaks before torch looks whether it lives."""

    def batches() -> Iterator[int]:
        yield 1
        raise error

    reader: MicroBatchReader[int] = MicroBatchReader()
    reader.start(batches())
    assert reader.read_next() == (1, "")
    last_item, message = reader.read_next()
    assert last_item == 1
    assert re.search(f"has ended: DataLoader worker,? {said}", message)
    assert "lower data.workers" in message


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "/data/a.mp4"),
        FileNotFoundError(
            "Caught FileNotFoundError in DataLoader worker process 0.\nTraceback ...\n"
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/a.mp4'"
        ),
    ],
)
def test_a_file_that_is_gone_is_named_and_no_worker_is(error: Exception) -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise error

    reader: MicroBatchReader[int] = MicroBatchReader()
    reader.start(batches())
    reader.read_next()
    _, message = reader.read_next()
    assert "No such file or directory: " in message
    assert "/data/a.mp4" in message
    assert "data.workers" not in message


def test_what_went_wrong_in_the_program_is_not_told_as_a_dead_worker() -> None:
    reader: MicroBatchReader[int] = MicroBatchReader()

    def batches() -> Iterator[int]:
        raise RuntimeError("shapes differ")
        yield 1

    reader.start(batches())
    with pytest.raises(RuntimeError, match="shapes differ"):
        reader.read_next()
