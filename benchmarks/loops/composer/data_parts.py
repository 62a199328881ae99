"""Code for the data of a composed loop: datasets, collate functions, loaders, and how batches are taken from them."""

from textwrap import dedent

from benchmarks.loops.composer.plan import Plan

_ROWS = """\
class Rows(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
{broken}        return {item}
"""
_STREAM = """\
class Stream(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        yield from zip(self.x, self.y)
"""
_BROKEN = """\
        if index in (3, 11):  # cannot be read
            return None
"""
_COLLATES = {
    "sorted": """\
def collate(rows):
    return default_collate(sorted(rows, key=lambda row: float(row[{key}][0])))
""",
    "reversed": """\
def collate(rows):
    return default_collate(rows[::-1])
""",
    "drop_broken": """\
def collate(rows):
    return default_collate([row for row in rows if row is not None])
""",
    "padded": """\
def collate(rows):
    x = pad_sequence([row[0] for row in rows], batch_first=True)
    return x, torch.tensor([len(row[0]) for row in rows]), torch.stack([row[1] for row in rows])
""",
    "padded_sorted": """\
def collate(rows):
    rows = sorted(rows, key=lambda row: len(row[0]), reverse=True)
    x = pad_sequence([row[0] for row in rows], batch_first=True)
    return x, torch.tensor([len(row[0]) for row in rows]), torch.stack([row[1] for row in rows])
""",
}
_PREFETCH = """\
def prefetched(loader):
    upcoming = None
    for batch in loader:
        if upcoming is not None:
            yield upcoming
        upcoming = batch
    yield upcoming
"""
_THREAD = """\
def background(loader):
    batches = queue.Queue(maxsize=2)

    def read():
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := batches.get()) is not None:
        yield batch
"""
_DATA = {
    "tensors": "data = TensorDataset(x, y)",
    "pairs": "data = list(zip(x, y))",
    "dataset": "data = Rows(x, y)",
    "dicts": "data = Rows(x, y)",
    "stream": "data = Stream(x, y)",
    "subset": "data = Subset(TensorDataset(x, y), list(range(23, 3, -1)))",
    "concat": "data = ConcatDataset([TensorDataset(x[:10], y[:10]), TensorDataset(x[10:], y[10:])])",
    "sequences": "data = list(zip(x, y))",
}
_LOADER = {
    "plain": "batch_size=4",
    "shuffled": "batch_size=4, shuffle=True",
    "sampler": "batch_size=4, sampler=WeightedRandomSampler(torch.ones(len(data)), 24)",
    "batch_sampler": "batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last=False)",
    "one_worker": "batch_size=4, num_workers=1",
    "persistent_workers": ("batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=4"),
}


def data_definitions(plan: Plan) -> list[str]:
    """Classes and functions that the data needs."""
    blocks = []
    if plan.data in ("dataset", "dicts"):
        item = "self.x[index], self.y[index]"
        if plan.data == "dicts":
            item = '{"x": self.x[index], "y": self.y[index]}'
        broken = _BROKEN if plan.collate == "drop_broken" else ""
        blocks.append(_ROWS.format(item=item, broken=broken))
    if plan.data == "stream":
        blocks.append(_STREAM)
    if plan.collate in _COLLATES:
        key = '"y"' if plan.data == "dicts" else "1"
        blocks.append(_COLLATES[plan.collate].replace("{key}", key))
    if plan.walk == "prefetch":
        blocks.append(_PREFETCH)
    if plan.walk == "thread":
        blocks.append(_THREAD)
    return [dedent(block).rstrip("\n") for block in blocks]


def data_lines(plan: Plan) -> list[str]:
    """Tensors, dataset and loader. The planted index is one that every dataset reads."""
    sequences = "[torch.randn(3 + (5 * i) % 7, 4) for i in range(24)]"
    rows = sequences if plan.is_sequence else "torch.randn(24, 4)"
    lines = [
        f"x = plant.spoil_samples({rows})",
        "y = plant.spoil_targets(torch.randn(24, 1))",
    ]
    if plan.loader == "no_loader":
        return lines
    arguments = _LOADER[plan.loader]
    if plan.collate != "default":
        arguments += ", collate_fn=collate"
    lines += [_DATA[plan.data], f"loader = DataLoader(data, {arguments})"]
    if plan.walk == "cycle":
        lines.append("batches = itertools.cycle(loader)")
    if plan.walk in ("list", "reversed_list"):
        lines.append("batches = list(loader)")
    return lines


def walk_lines(plan: Plan) -> list[str]:
    """The head of the inner loop, and how a batch is taken apart."""
    names = "a, n, b" if plan.is_sequence else "a, b"
    if plan.loader == "no_loader":
        return [
            "for i in range(0, 24, 4):",
            "    rows = order[i : i + 4]",
            "    a, b = x[rows], y[rows]",
        ]
    source = {
        "for": "loader",
        "list": "batches",
        "reversed_list": "reversed(batches)",
        "prefetch": "prefetched(loader)",
        "thread": "background(loader)",
    }
    if plan.data == "dicts":
        unpack = ['    a, b = batch["x"], batch["y"]']
        if plan.walk == "cycle":
            return ["for _ in range(6):", "    batch = next(batches)", *unpack]
        return [f"for batch in {source[plan.walk]}:", *unpack]
    if plan.walk == "cycle":
        return ["for _ in range(6):", f"    {names} = next(batches)"]
    return [f"for {names} in {source[plan.walk]}:"]


def batch_lines(plan: Plan) -> list[str]:
    """What the loop does to a batch before the model sees it."""
    lengths = ", n" if plan.is_sequence else ""
    permuted = ", ".join(f"{name}[order]" for name in ("a, n, b" if lengths else "a, b").split(", "))
    return {
        "unchanged": [],
        "scaled": ["a = a * 2"],
        "normalised": ["a = (a - 0.1) / 0.9"],
        "permuted": ["order = torch.randperm(len(a))", f"a{lengths}, b = {permuted}"],
        "rolled": ["a, b = a.roll(1, 0), b.roll(1, 0)"],
        "filtered": [
            "keep = a[:, 1] > -1.5",
            "keep[0] = True  # a batch without rows has a loss of NaN, which is a fault",
            "a, b = plant.drop_rows(a[keep], b[keep])",
        ],
        "copied": ["inputs.copy_(a)", "targets.copy_(b)", "a, b = inputs, targets"],
    }[plan.batch]
