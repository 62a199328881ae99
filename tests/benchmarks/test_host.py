"""The benchmark of host time: real launches up to the driver; a shape's second launch has the first's arguments."""

import os
import re
import subprocess
import sys

import pytest
from launching import ROOT

pytest.importorskip("triton.backends.nvidia", reason="compiles for sm_90")

SCRIPT = """
import torch
from benchmarks import host, host_driver
from dit_lora_kernels import support

host.launch_on_cpu()
seen = []
host_driver._Launcher.__call__ = lambda self, *args: seen.append(args)

def plain(args):
    return [(a.dtype, tuple(a.shape)) if isinstance(a, torch.Tensor) else a for a in args]

for call in host.op_calls():
    launched = []
    for _ in range(2):
        seen.clear()
        call.run()
        # Without the metadata and hooks of profilers, objects of each launch.
        launched.append([plain(args[:6] + args[9:]) for args in seen])
    if call.column.startswith("ours") and not call.name.startswith("lora"):
        assert launched[0] and launched[0] == launched[1], call
        print(call.name, call.column, len(launched[0]))
print(len(support._LAUNCHES), "kept")
host_driver._Launcher.__call__ = lambda self, *args: None
host.main(["--ops", "--rounds", "1"])
"""


@pytest.mark.thorough
def test_a_launch_past_tritons_look_up_is_that_launch() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], cwd=ROOT,
        env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    launches, _, table = process.stdout.partition(" kept\n")
    *ops, num_launches = launches.splitlines()
    assert len(ops) == 11  # five ops forward, and four of them both ways, ada_norm as two
    assert int(num_launches) >= 10
    # The benchmark's table: four times in microseconds, and a ratio.
    assert re.search(r"^\| lora_qkv (\| [\d.]+ ){4}\| \d+\.\d\d \|$", table, flags=re.MULTILINE), table
