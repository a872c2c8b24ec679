"""Rows of problems, written in every form that a source reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from runspec.core.schema import RunSpec, Source
from runspec.core.schema.load import parse_resolved
from sampler.tasks.interfaces import Keep, Part
from verify.formats.lease import Lease, assignments
from verify.plugins import load_task_set

Row = dict[str, Any]


def make_rows(count: int, *, start: int = 0) -> list[Row]:
    return [
        {
            "problem_id": f"p-{i}",
            "task_type": "math",
            "prompt": f"what is {i} plus {i}?",
            "verification_info": json.dumps({"ground_truth": str(2 * i)}),
            "rate": i % 9 / 8,
        }
        for i in range(start, start + count)
    ]


def write_jsonl(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: Sequence[Row], *, group: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=group)
    return path


def write_dataset(folder: Path, rows: Sequence[Row], *, shards: int = 2) -> Path:
    """The files of `datasets.Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    size = -(-len(rows) // shards)
    for i, name in enumerate(names):
        table = pa.Table.from_pylist(list(rows[i * size : (i + 1) * size]))
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=5)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def write_dataset_dict(folder: Path, splits: dict[str, Sequence[Row]]) -> Path:
    """The files of `datasets.DatasetDict.save_to_disk`."""
    for name, rows in splits.items():
        write_dataset(folder / name, rows)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def one_jsonl(folder: Path, rows: Sequence[Row]) -> Source:
    return source("jsonl", write_jsonl(folder / "rows.jsonl", rows))


def folder_of_jsonl(folder: Path, rows: Sequence[Row]) -> Source:
    write_jsonl(folder / "b" / "2.jsonl", rows[10:])
    write_jsonl(folder / "a" / "1.jsonl", rows[:10])
    (folder / "README.md").write_text("not rows")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "0.jsonl").write_text("not rows either")
    return source("jsonl", folder)


def one_parquet(folder: Path, rows: Sequence[Row]) -> Source:
    return source("parquet", write_parquet(folder / "rows.parquet", rows))


def shards_of_parquet(folder: Path, rows: Sequence[Row]) -> Source:
    """Linked, as in the cache of `huggingface_hub`."""
    for i in range(0, len(rows), 10):
        write_parquet(folder / "blobs" / f"{i:x}", rows[i : i + 10], group=4)
        (folder / "snapshot" / "data").mkdir(parents=True, exist_ok=True)
        link = folder / "snapshot" / "data" / f"train-{i // 10:05d}.parquet"
        link.symlink_to(f"../../blobs/{i:x}")
    return source("parquet", folder / "snapshot")


def pattern_of_parquet(folder: Path, rows: Sequence[Row]) -> Source:
    write_parquet(folder / "train-0.parquet", rows[:15])
    write_parquet(folder / "train-1.parquet", rows[15:])
    write_parquet(folder / "test-0.parquet", make_rows(3, start=9000))
    return source("parquet", folder / "train-?.parquet")


def saved_dataset(folder: Path, rows: Sequence[Row]) -> Source:
    return source("hf_dataset", write_dataset(folder / "saved", rows))


def saved_dataset_dict(folder: Path, rows: Sequence[Row]) -> Source:
    splits = {"test": make_rows(3, start=9000), "train": rows}
    path = write_dataset_dict(folder / "saved", splits)
    return source("hf_dataset", path, params={"split": "train"})


FORMS: dict[str, Callable[[Path, Sequence[Row]], Source]] = {
    form.__name__: form
    for form in (
        one_jsonl,
        folder_of_jsonl,
        one_parquet,
        shards_of_parquet,
        pattern_of_parquet,
        saved_dataset,
        saved_dataset_dict,
    )
}


def source(kind: str, uri: Path | str | None, **fields: Any) -> Source:
    return Source(name="rows", kind=kind, uri=None if uri is None else str(uri), **fields)


class KeepAll(Keep):
    """A `Keep` that says which texts it was asked about."""

    digest = "all"
    known = get_args(Part)

    def __init__(self) -> None:
        self.asked: list[str] = []

    def parts(self, problems: Sequence[str]) -> list[Part]:
        self.asked += problems
        return ["train"] * len(problems)


def drawn(spec: RunSpec, tokenizer_dir: Path, data_dir: Path | None) -> list[Any]:
    """Digest of the data, number of problems, and [problem_id, prompt tokens] of each draw of some
    leases."""
    tasks = load_task_set(spec, tokenizer_dir, data_dir)
    prompts = []
    for index in range(8):
        digests = {"nonce": "ab" * 32, "worker": "cd" * 32, "manifest_digest": "ef" * 32}
        numbers = {"step": 1, "groups": 4, "version": 0, "issued": 1.0, "expires": 2.0}
        lease = Lease(run="r", pool="p", index=index, **digests, **numbers)
        for one in assignments(lease, n_problems=len(tasks), targets=tasks.targets):
            problem = tasks.problem(one.problem)
            prompts.append([problem.problem_id, tasks.prompt_tokens(one.problem, one.target)])
    return [tasks.data_digest, len(tasks), prompts]


def main() -> None:
    """Reads [spec file, tokenizer's folder, data's folder] of some specs, prints what is drawn."""
    found = []
    for spec, tokenizer_dir, data_dir in json.load(sys.stdin):
        resolved = parse_resolved(Path(spec).read_bytes(), place="spec")
        found.append(drawn(resolved, Path(tokenizer_dir), data_dir and Path(data_dir)))
    print(json.dumps(found))
