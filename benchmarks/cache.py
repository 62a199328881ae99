"""What the cache of encoded samples costs to read, to open and to hold.

    python -m benchmarks.cache [--rounds 15] [--entries 100000]

Reading: every entry once a round in random order, with a warm page cache. Three readers take turns: ours (digest
checked, in a map of the file), ours and a clone, and safetensors' own mapping of the same shards (each held open,
`get_tensor` and `clone`). Medians are reported, so that other work on the machine affects few of them. Holding:
resident memory of a new process while it reads many small entries in random order.
"""

import argparse
import pickle
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import psutil
import torch
from safetensors import safe_open

from dit_lora.data.cache.cache import TensorCache, encode_entry, make_entry_key
from dit_lora.data.cache.shards import list_shards
from dit_lora.errors import DitLoraError

LATENT, TEXT = (16, 9, 60, 90), (226, 4096)  # 33 frames of 480x720; T5 of CogVideoX
FACTS = {"vae": "ab" * 32, "dtype": "torch.bfloat16", "frames": 49, "size": [480, 720], "decode": 2}
Tensors = dict[str, torch.Tensor]


def clip(number: int) -> Tensors:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(LATENT, generator=generator).bfloat16() for name in ("latent_mean", "latent_logvar")}


def text(number: int) -> Tensors:
    generator = torch.Generator().manual_seed(number)
    return {"prompt_embeds": torch.randn(TEXT, generator=generator).bfloat16()}


def small(number: int) -> Tensors:
    return {"latent_mean": torch.full((2048,), float(number % 1000)).bfloat16()}


def write(root: Path, make: Callable[[int], Tensors], count: int, per_shard: int) -> list[str]:
    """A cache of `count` entries; its keys."""
    cache = TensorCache(root)
    keys = [make_entry_key({"number": number}) for number in range(count)]
    with mock.patch("os.fsync"):
        for begin in range(0, count, per_shard):
            cache.write_entries(
                [
                    encode_entry(key, make(n), sample=f"clips/{n:06d}.mp4", facts={**FACTS, "media": key})
                    for n, key in enumerate(keys[begin : begin + per_shard], begin)
                ]
            )
    return keys


def ours(root: Path, *, clone: bool) -> Callable[[str], None]:
    cache = TensorCache(root)

    def read(key: str) -> None:
        tensors, fault = cache.read(key, {})
        if fault:
            raise DitLoraError(fault)
        _copies = [tensor.clone() for tensor in tensors.values() if clone]

    return read


def mapped(root: Path) -> Callable[[str], None]:
    locations = {}
    for path in list_shards(root):
        file = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118
            locations.setdefault(name.partition("/")[0], []).append((file, name))

    def read(key: str) -> None:
        _copies = [file.get_tensor(name).clone() for file, name in locations[key]]

    return read


def seconds(read: Callable[[str], None], key: str) -> float:
    began = time.perf_counter()
    read(key)
    return time.perf_counter() - began


def measure(label: str, root: Path, keys: list[str], nbytes: int, rounds: int) -> str:
    """A row: GB/s by the median read, and ratios by the medians of each round."""
    kinds = {
        "mapped": mapped(root),
        "ours": ours(root, clone=False),
        "cloned": ours(root, clone=True),
    }
    medians: dict[str, list[float]] = {name: [] for name in kinds}
    draw = random.Random(0)
    for turn in range(rounds + 2):
        orders = {name: draw.sample(keys, len(keys)) for name in kinds}  # never the same in a row
        durations: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(len(keys)):
            for name in draw.sample(sorted(kinds), len(kinds)):
                durations[name].append(seconds(kinds[name], orders[name][number]))
        for name in kinds if turn > 1 else ():  # the first two warm up
            medians[name].append(statistics.median(durations[name]))
    cells = [label, f"{nbytes / 1e6:.2f}", str(len(list(list_shards(root))))]
    cells += [f"{1e-9 * nbytes / statistics.median(medians[name]):.3g}" for name in kinds]
    for name in ("ours", "cloned"):
        ratios = [m / o for m, o in zip(medians["mapped"], medians[name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    return f"| {' | '.join(cells)} |"


def hold(root: Path) -> None:
    """Open a cache and read every entry, and print what that takes; what the child process runs."""
    resident = psutil.Process().memory_info
    before, began = resident().rss, time.perf_counter()
    cache = TensorCache(root)
    count = len(cache)
    print(f"opening {count} entries: {time.perf_counter() - began:.2f} s")
    print(f"the index: {1e-6 * len(pickle.dumps(cache)):.1f} MB pickled for a worker")
    keys = [make_entry_key({"number": number}) for number in range(count)]
    random.Random(0).shuffle(keys)
    began = time.perf_counter()
    print("| reads | resident, MiB more than at the start |\n|---:|---:|")
    print(f"| 0 | {(resident().rss - before) / 2**20:.0f} |")
    for number, key in enumerate(keys, 1):
        fault = cache.read(key, {})[1]
        if fault:
            raise DitLoraError(fault)
        if number in (count // 100, count // 10, count // 2, count):
            print(f"| {number} | {(resident().rss - before) / 2**20:.0f} |")
    print(f"{1e6 * (time.perf_counter() - began) / count:.0f} us a read of 4 kB")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clips", type=int, default=128)
    parser.add_argument("--entries", type=int, default=100_000, help="small ones, to hold")
    parser.add_argument("--hold", type=Path, help=argparse.SUPPRESS)  # what the child process runs
    arguments = parser.parse_args(argv)
    if arguments.hold:
        hold(arguments.hold)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {platform.machine()}\n")
    print(
        "| entries | MB | shards | safetensors and clone, GB/s | ours | ours and clone "
        "| ours over safetensors | with clone |\n|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    for kind, make, per_shard in (("clips", clip, 16), ("texts", text, 16), ("clips", clip, 4)):
        with tempfile.TemporaryDirectory() as folder:
            keys = write(Path(folder), make, arguments.clips, per_shard)
            nbytes = sum(tensor.nbytes for tensor in make(0).values())
            print(measure(kind, Path(folder), keys, nbytes, arguments.rounds), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), small, arguments.entries, 16)
        command = [sys.executable, "-m", "benchmarks.cache", "--hold", folder]
        print(f"\n{subprocess.run(command, capture_output=True, text=True, check=True).stdout}")


if __name__ == "__main__":
    main()
