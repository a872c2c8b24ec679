"""Files larger than one would want to hold: problems are read from them one at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sampler.tasks.row_files import make_rows, write_dataset

ROWS, GROUP = 10_000, 250
TEXT_BYTES = 20_000
READ = """\
import json, os, random, sys, threading, time
import pyarrow as pa
import sampler.tasks.sources.parquet as parquet
from sampler.tasks.interfaces import make_source
from tests.sampler.tasks.row_files import KeepAll, source

class Keep(KeepAll):
    def many(self, problems): return [True] * len(problems)

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

seen, over = [], threading.Event()
def watch():
    while not over.wait(0.01):
        seen.append(held())

parquet.CACHED_BYTES = 2**23
before, threads = held(), len(os.listdir("/proc/self/task"))
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
made = make_source(source(sys.argv[1], sys.argv[2]), 1, Keep())
draw = random.Random(1)
ids = [made.problem(draw.randrange(len(made))).problem_id for _ in range(300)]
over.set()
watcher.join()  # a daemon that holds a file's lock at the end would abort the process
ends = time.monotonic() + 10
while len(os.listdir("/proc/self/task")) > threads and time.monotonic() < ends:
    time.sleep(0.01)  # a thread that was joined may not have left the kernel yet
threads = len(os.listdir("/proc/self/task")) - threads
grown = max(seen) - before
print(json.dumps([len(made), len(set(ids)), grown, pa.total_allocated_bytes(), threads]))
"""


def tables() -> Iterator[pa.Table]:
    """Groups of long rows."""
    for start in range(0, ROWS, GROUP):
        rows = make_rows(GROUP, start=start)
        for i, row in enumerate(rows):
            info = {"ground_truth": "1", "tests": f"{start + i:08d}" * (TEXT_BYTES // 8)}
            row["verification_info"] = json.dumps(info)
        yield pa.Table.from_pylist(rows)


def write(kind: str, folder: Path) -> Path:
    """200 MB of rows, of which 5 MB make a row group."""
    schema = next(tables()).schema
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        with path.open("w") as file:
            for table in tables():
                file.writelines(json.dumps(row) + "\n" for row in table.to_pylist())
    elif kind == "parquet":
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for table in tables():
                writer.write_table(table)
    else:
        path = write_dataset(folder / "saved", [])
        for name in sorted(path.glob("*.arrow")):
            with pa.OSFile(str(name), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
                for table in tables() if name.name.startswith("data-00000") else ():
                    writer.write_table(table)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf_dataset"])
def test_a_source_holds_a_part_of_its_files(tmp_path: Path, kind: str) -> None:
    # Given a file of many long rows
    path = write(kind, tmp_path)
    # When a process makes a source of it, with little room for row groups, and reads 300
    done = subprocess.run(
        [sys.executable, "-c", READ, kind, str(path)], capture_output=True, check=True, timeout=200
    )
    count, different, grown, allocated, threads = json.loads(done.stdout)
    # Then it had them all, and at no time half of the files in memory
    assert (count, different > 280) == (ROWS, True)
    # and no thread of Arrow's is left: at the process's end it might hold a file of Python's
    assert threads == 0
    if kind == "hf_dataset":  # whose pages are mapped
        assert allocated < ROWS * TEXT_BYTES / 100
    else:
        assert grown < ROWS * TEXT_BYTES / 2
