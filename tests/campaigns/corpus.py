"""A corpus of fifty million reads, generated as it is made, in bounded memory and disk.

METAGENE-1's scheme: reads of 126 bases, its tokenizer, rows of 512 tokens. All cores of a machine
tokenize. Memory is what the processes have that no file holds, added up every second; pages of
mapped files can be dropped at any time. CORPUS_READS says how many reads there are.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from learner_jax.corpus.packed import open_corpus
from runspec.core.models.family import hf_config, model_config
from runspec.core.schema.load import SpecFiles
from runspec.lint.check import check_spec
from tests.harness import ROOT

READS = int(os.environ.get("CORPUS_READS", "50_000_000"))
MEMORY_BYTES, DISK_BYTES = 4e9, 20e9
"""Most that it may have."""
ROWS, LOOK_S = 512, 1.0
"""Rows that are read at the end, and seconds between two looks at the memory."""


class Watch(logging.Handler):
    """Notes the memory of this process and its children, and when how much has been read."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.read, self._stop = 0.0, list[tuple[float, int]](), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        word, _, rest = record.getMessage().partition(" ")
        if word == "read":
            self.read.append((time.monotonic(), int(rest.split()[0].replace(",", ""))))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        me = str(os.getpid())
        while not self._stop.wait(LOOK_S):
            found = 0.0
            for status in Path("/proc").glob("[0-9]*/status"):
                try:
                    said = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
                except (OSError, ValueError):  # it has ended
                    continue
                if me in (said["Pid"], said["PPid"].strip()):
                    kinds = ("RssAnon", "RssShmem")
                    found += sum(1024.0 * int(said.get(kind, "0 kB").split()[0]) for kind in kinds)
            self.peak = max(self.peak, found)


def run() -> dict[str, object]:
    """Make a corpus, and read rows of it.

    Raises:
        RuntimeError: it takes more memory or disk than it may.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder, log = Path(tempfile.mkdtemp(prefix="corpus-")), logging.getLogger("corpus")
    sets = [
        f"data.sources.generated.params={{organisms: 8, reads: {READS}, length: 126, seed: 0}}",
        "learner.packing.tokens=512",
        "model.max_context=512",
        "algorithm.tokens_per_update=16384",
    ]
    files = SpecFiles(ROOT / "specs" / "metagene.yaml", "laptop", overrides=sets)
    spec = check_spec(files, environ={}).require()
    config = model_config(spec)
    assert config is not None
    shutil.copytree(ROOT / "specs" / "tokenizers" / "metagene", folder / "model")
    fields = hf_config(config, dtype="float32", eos_token_id=4, pad_token_id=0)
    (folder / "model" / "config.json").write_text(json.dumps(fields))
    try:
        with Watch() as watch:
            log.addHandler(watch)
            begun_at = time.monotonic()
            corpus = open_corpus(spec, folder / "model", folder / "cache", log)
            made_s = time.monotonic() - begun_at
        disk = sum(path.stat().st_size for path in (folder / "cache").rglob("*"))
        read = np.random.default_rng(0).integers(corpus.rows, size=ROWS)
        begun = time.monotonic()
        for row in read.tolist():
            corpus.read(row, row + 1)
        read_s = (time.monotonic() - begun) / ROWS
    finally:
        shutil.rmtree(folder)
    (first, few), (last, all_reads) = watch.read[0], watch.read[-1]
    late = next(i for i, (_, count) in enumerate(watch.read) if count >= 0.8 * all_reads)
    at, most = watch.read[late]
    figures: dict[str, object] = {
        "reads": READS,
        "tokens": corpus.totals.tokens,
        "rows": corpus.rows,
        "padding": f"{1 - corpus.totals.tokens / (corpus.rows * 512):.2%}",
        "cores": len(os.sched_getaffinity(0)),
        "tokenizing": f"{all_reads / (last - begun_at):,.0f} reads/s",
        "its first lines": f"{few / (first - begun_at):,.0f} reads/s",
        "its last fifth": f"{(all_reads - most) / (last - at):,.0f} reads/s",
        "packing": f"{(begun_at + made_s - last) / READS * 1e6:.1f} us a read",
        "in all": f"{made_s:.0f} s",
        "memory": f"{watch.peak / 1e9:.2f} GB",
        "disk": f"{disk / 1e9:.2f} GB",
        "reading a row": f"{read_s * 1e3:.2f} ms",
    }
    if watch.peak > MEMORY_BYTES or disk > DISK_BYTES:
        most_of = f"{MEMORY_BYTES:g} bytes of memory or {DISK_BYTES:g} of disk"
        raise RuntimeError(f"more than {most_of}: {figures}")
    return figures
