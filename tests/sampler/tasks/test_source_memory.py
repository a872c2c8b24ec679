"""Files larger than one would want to hold: problems are read from them one at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sampler.tasks.row_files import make_rows, write_dataset

ROWS = 20_000
TEXT_BYTES = 20_000
READ = """\
import json, random, sys, threading, time
from sampler.tasks.interfaces import make_source
from tests.sampler.tasks.row_files import KeepAll, source

class Keep(KeepAll):
    def many(self, problems): return [True] * len(problems)

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

seen = []
def watch():
    while True:
        seen.append(held())
        time.sleep(0.01)

import sampler.tasks.sources.parquet
before = held()
threading.Thread(target=watch, daemon=True).start()
made = make_source(source(sys.argv[1], sys.argv[2]), 1, Keep())
draw = random.Random(1)
ids = [made.problem(draw.randrange(len(made))).problem_id for _ in range(300)]
print(json.dumps([len(made), len(set(ids)), max(seen) - before]))
"""


def long_rows(start: int, count: int) -> list[dict[str, object]]:
    rows = make_rows(count, start=start)
    for i, row in enumerate(rows):
        info = {"ground_truth": "1", "tests": f"{start + i:08d}" * (TEXT_BYTES // 8)}
        row["verification_info"] = json.dumps(info)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_source_holds_a_part_of_its_files(tmp_path: Path, kind: str) -> None:
    # Given 400 MB of rows, of which 10 MB make a row group (pages of mapped files do not count)
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        with path.open("w") as file:
            for start in range(0, ROWS, 500):
                file.writelines(json.dumps(row) + "\n" for row in long_rows(start, 500))
    else:
        schema = pa.Table.from_pylist(long_rows(0, 1)).schema
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for start in range(0, ROWS, 500):
                writer.write_table(pa.Table.from_pylist(long_rows(start, 500)))
    assert path.stat().st_size > ROWS * TEXT_BYTES

    # When a process makes a source of them, with little room for row groups, and reads 300
    limit = "import sampler.tasks.sources.parquet as p; p.CACHED_BYTES = 2**24\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + READ, kind, str(path)],
        capture_output=True,
        check=True,
        timeout=200,
    )
    count, different, grown = json.loads(done.stdout)

    # Then it had them all, and at no time half of the files in memory
    assert (count, different > 290) == (ROWS, True)
    assert grown < ROWS * TEXT_BYTES / 2


@pytest.mark.slow
def test_a_saved_dataset_stays_in_its_files(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "saved", [])
    schema = pa.Table.from_pylist(long_rows(0, 1)).schema
    for name in sorted(folder.glob("*.arrow")):
        with pa.OSFile(str(name), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            if name.name.startswith("data-00000"):
                for start in range(0, ROWS, 500):
                    writer.write_table(pa.Table.from_pylist(long_rows(start, 500)))
    allocated = READ.replace("max(seen) - before]", "pa.total_allocated_bytes()]")
    done = subprocess.run(
        [sys.executable, "-c", f"import pyarrow as pa\n{allocated}", "hf_dataset", str(folder)],
        capture_output=True,
        check=True,
        timeout=200,
    )
    count, _, allocated_bytes = json.loads(done.stdout)
    assert count == ROWS
    assert allocated_bytes < ROWS * TEXT_BYTES / 100
