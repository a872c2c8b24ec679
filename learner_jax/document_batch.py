"""From a signed manifest of row numbers to rows of documents: what a supervised step trains."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from io import BytesIO

import numpy as np

from learner_jax.corpus.packed import Corpus, open_corpus
from learner_jax.corpus.rows import CorpusRows
from learner_jax.learner_run import LearnerRun
from learner_jax.manifests import ManifestReader, manifest_digest, own_share
from learner_jax.packing import TokenBatch
from runspec.core.canonical import canonical_json, parse_object
from runspec.core.run_files import initial_model
from verify.formats.islands import IslandShare
from verify.formats.ranges import RangeManifest, RowRange


@dataclass(frozen=True)
class DocumentBatch:
    """The rows of one step."""

    manifest: RangeManifest
    rows: CorpusRows

    @property
    def digest(self) -> str:
        """Digest of what the manifest says, whoever signed it when."""
        return manifest_digest(self.manifest)


class DocumentReader(ManifestReader[RangeManifest]):
    """Waits for the manifests of a run, and reads the rows that they number for this learner.

    While a step is trained, the rows of the next one are read: a manifest names the rows that
    follow those of the manifest before.

    Args:
        run: whose corpus is opened, or made.
        root_public_key: pinned; signs `keys/roles.json`.

    Raises:
        UserError: the roles or the documents cannot be read.
    """

    def __init__(self, run: LearnerRun, root_public_key: str) -> None:
        super().__init__(run.folder, run.spec, root_public_key)
        self._island = run.island
        model, cache = initial_model(run.folder), run.corpus_cache
        self.corpus: Corpus = open_corpus(run.spec, model, cache, run.log)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._ahead: tuple[RowRange, Future[CorpusRows]] | None = None

    def read(self, manifest: RangeManifest) -> DocumentBatch:
        """Read the rows that a manifest numbers for this learner."""
        share = own_share(manifest, self._island)
        asked, ahead = RowRange(share.start, share.stop), self._ahead
        if ahead is not None and ahead[0] == asked:
            rows = ahead[1].result()
        else:
            rows = self.corpus.read(asked.first, asked.last)
        count = manifest.rows.last - manifest.rows.first
        following = RowRange(asked.first + count, asked.last + count)
        read = self._thread.submit(self.corpus.read, following.first, following.last)
        self._ahead = following, read
        return DocumentBatch(manifest, rows)


def encode_rows(rows: CorpusRows, manifest: RangeManifest | None = None) -> bytes:
    """The bytes of rows; `decode_rows` gives them back bit for bit."""
    said = b"" if manifest is None else canonical_json(asdict(manifest))
    data = BytesIO()
    arrays = {**vars(rows.batch), "weights": rows.weights}
    np.savez(data, allow_pickle=False, manifest=np.frombuffer(said, np.uint8), **arrays)
    return data.getvalue()


def encode_documents(batch: DocumentBatch) -> bytes:
    """The bytes of a batch; `decode_documents` gives it back bit for bit."""
    return encode_rows(batch.rows, batch.manifest)


def decode_rows(data: bytes) -> CorpusRows:
    """Read the rows that `encode_rows` wrote in process 0."""
    with np.load(BytesIO(data), allow_pickle=False) as found:
        names = (field.name for field in fields(TokenBatch))
        return CorpusRows(TokenBatch(*(found[name] for name in names)), found["weights"])


def decode_documents(data: bytes) -> DocumentBatch:
    """Read the batch that `encode_documents` wrote in process 0."""
    with np.load(BytesIO(data), allow_pickle=False) as found:
        said = parse_object(found["manifest"].tobytes(), max_bytes=len(data))
    rows = RowRange(**said.pop("rows"))
    shares = [IslandShare(**share) for share in said.pop("shares")]
    return DocumentBatch(RangeManifest(**said, rows=rows, shares=shares), decode_rows(data))
