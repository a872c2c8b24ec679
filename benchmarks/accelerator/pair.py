"""Two processes with a GPU each: their collectives, and the learner's gradient against one GPU's.

`python -m benchmarks.accelerator.pair INDEX ADDRESS SMALL` is one of the two processes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.accelerator.case import LAYERS, Case
from benchmarks.accelerator.rows import Row, Settings, at_most, serve
from benchmarks.accelerator.update import prepare
from learner_jax.distributed import joined

LIMIT = 1e-3
"""Relative difference of loss and norm of the gradient: sums in another order, in float32."""
ROWS, WAIT_S = 2, 300
GATHERED = 1 << 28
"""Bytes of each process's part."""


def measure(settings: Settings) -> Iterator[Row]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    pair = [started(number, address, settings) for number in range(2)]
    first, _ = [json.loads(each.communicate(timeout=WAIT_S)[0].splitlines()[-1]) for each in pair]
    yield at_most("sum over two processes, difference", first["sum"], 0.0)
    yield Row("all-gather of two processes", settings.speed(f"{first['gathered']:.0f} GB/s"))
    alone = gradient(settings.small, [jax.devices()[0]])
    for name in ("loss", "norm"):
        distance = abs(first[name] - alone[name]) / abs(alone[name])
        yield at_most(f"learner of two processes: {name}, relative difference", distance, LIMIT)


def started(number: int, address: str, settings: Settings) -> subprocess.Popen[str]:
    """Start one of the two, which sees one GPU."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    own = {"CUDA_VISIBLE_DEVICES": seen[number] if len(seen) > number else ""}
    words = [sys.executable, "-m", __spec__.name, str(number), address, str(int(settings.small))]
    return subprocess.Popen(words, env=os.environ | own, stdout=subprocess.PIPE, text=True)


def one_of_two(index: int, address: str, small: bool) -> dict[str, float]:
    log = logging.getLogger(__name__)
    with joined(2, address, index, log, join_s=120, heartbeat_s=60):
        devices = [next(d for d in jax.devices() if d.process_index == each) for each in range(2)]
        return collectives(devices, small) | gradient(small, devices)


def collectives(devices: list[Any], small: bool) -> dict[str, float]:
    """Difference of a sum from that of numpy, and GB/s of an all-gather."""
    mesh = Mesh(np.array(devices), "both")
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("both",), ()))
    count = 1 << 10 if small else GATHERED // 4
    given = np.arange(2 * count, dtype=np.float32) % 7
    array = jax.make_array_from_callback(given.shape, split, lambda index: given[index])
    total = float(jax.jit(lambda x: x.reshape(2, -1).sum(0)[:7], out_shardings=whole)(array).sum())
    expected = float(given.reshape(2, -1).sum(0)[:7].sum())
    gather = jax.jit(lambda x: x + 0, out_shardings=whole)
    jax.block_until_ready(gather(array))
    multihost_utils.sync_global_devices("gather")
    begun = time.perf_counter()
    jax.block_until_ready(gather(array))
    seconds = time.perf_counter() - begun
    return {"sum": abs(total - expected), "gathered": given.nbytes / 2 / seconds / 1e9}


def gradient(small: bool, devices: list[Any]) -> dict[str, float]:
    """Loss and norm of the gradient of one batch, on these devices."""
    shape, tokens = ("tiny", 256) if small else ("small", 4096)
    case = Case(shape, LAYERS[shape], tokens, dtype="float32", attention="xla")
    ready = prepare(case, devices=devices, rows=ROWS)
    found = ready.accumulate(ready.old_logprobs())
    _, update = ready.programs.apply(ready.state, found)
    return {"loss": float(found.metrics.loss), "norm": float(update.grad_norm)}


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1].isdecimal():
        print(json.dumps(one_of_two(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1")))
    else:
        serve(measure)
