"""Hugging Face directories of versions: how one is written, and checked against its manifest.

The base of the prefill engines, which fetches and loads the versions that leases may name, is here
too, and how the problems' files are published and fetched.
"""

from __future__ import annotations

import logging
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, Generic, TypeVar

from bridge.safetensors_io import wrong_tensor
from broadcast.client import WeightsClient
from broadcast.layout import TENSORS_NAME, data_run
from broadcast.manifest import FILE_NAME, MAX_BYTES, WeightsManifest, open_manifest
from broadcast.store import publish_data
from runspec.core.canonical import digest_file
from runspec.core.errors import UserError, one_line
from runspec.core.files import Folder, new_directory, read_bounded
from runspec.core.models import CONFIG_NAME, TOKENIZER_NAMES, read_config
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import issued_at, open_roles
from runspec.core.run_files import versions_in
from runspec.core.schema import RunSpec
from runspec.core.schema.source_files import file_digest, source_files
from runspec.core.signed import BadSignature
from verify.formats.documents import SiteFile
from verify.plugins import PrefillInput, PrefillOutput, WeightsLocation
from verify.truncation import Truncation

GENERATION_NAME = "generation_config.json"
MODEL_FOLDER = "hugging_face"
"""The folder of a checkpoint that `import` writes them to."""


def copy_model_files(source: Path, target: Path) -> None:
    """Copies the config, the defaults of generation and the tokenizer: those that there are."""
    target.mkdir(exist_ok=True)
    for name in (CONFIG_NAME, GENERATION_NAME, *TOKENIZER_NAMES):
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def model_directory(checkpoint: Folder) -> Path:
    """Where the config of a checkpoint lies: in it, or beside it.

    Raises:
        UserError: nowhere there.
    """
    if isinstance(checkpoint, Path):
        for folder in (checkpoint / MODEL_FOLDER, checkpoint, checkpoint.parent):
            if (folder / CONFIG_NAME).is_file():
                return folder
    raise UserError(
        f"no {CONFIG_NAME} in it or beside it",
        place=str(checkpoint),
        remedy="name the model's Hugging Face directory: --model-dir DIR",
    )


def stated_dtype(model_dir: Path) -> str:
    """The type that a config.json names for the weights.

    Raises:
        UserError: it names none.
    """
    config = read_config(model_dir)
    dtype = config.get("dtype", config.get("torch_dtype"))
    if not isinstance(dtype, str):
        raise UserError(
            "names no dtype", place=str(model_dir / CONFIG_NAME), remedy="choose one: --dtype D"
        )
    return dtype


@contextmanager
def output_directory(
    path: Path, faults: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[Path]:
    """Yields a folder that becomes `path` by one rename when the block succeeds.

    Args:
        path: must not exist.
        faults: errors which mean that the disk did not take something.

    Raises:
        UserError: `path` exists, or cannot be written.
    """
    try:
        with new_directory(path) as folder:
            yield folder
    except FileExistsError as error:
        raise UserError(
            "exists already", place=str(path), remedy="name a new directory, or remove it"
        ) from error
    except faults as error:
        raise UserError(
            f"cannot write: {getattr(error, 'strerror', None) or error}",
            place=str(path),
            remedy="free disk space or mend the permissions, then try again",
        ) from error


ROLES_NAME = "roles.json"
CARD_NAME = "README.md"
"""Name of the model card."""
_BESIDE = {FILE_NAME, TENSORS_NAME, ROLES_NAME, CARD_NAME}
"""Files that may lie beside those of the version. No library reads a model from them."""


def require_published(folder: Path, manifest: WeightsManifest) -> None:
    """Require that every tensor, and every file that the manifest lists whole, has its digest, and
    that nothing else is there: libraries load a `model.safetensors` before an index of shards, or
    a `chat_template.jinja` that happens to be there.

    Args:
        folder: Hugging Face directory; manifest, roles and model card may lie in it, too.
        manifest: of the version; its signature was checked.

    Raises:
        UserError: a file is missing, differs, or does not belong to the version.
    """
    digests = {name: record["blake3"] for name, record in manifest.tensors.items()}
    wrong = wrong_tensor(folder, digests)
    for name, info in manifest.objects.items():
        if wrong is None and name not in manifest.files:
            path = folder / name
            if not path.is_file() or digest_file(path) != info.blake3:
                wrong = f"{name} is missing or not what was published"
    remedy = "fetch or export it again"
    known = {*manifest.objects, *manifest.files, *_BESIDE}
    if wrong is None and (others := sorted({path.name for path in folder.iterdir()} - known)):
        wrong = f"{one_line(others[0], 80)!r} is none of its files"
        remedy = "remove what does not belong to it, or export it to a new folder"
    if wrong is not None:
        raise UserError(
            f"not version {manifest.version} of {manifest.run}: {wrong}",
            place=str(folder),
            remedy=remedy,
        )


def check_signed(folder: Path, *, run: str, root_public_key: str) -> WeightsManifest:
    """Check a directory that has `manifest.json` and `roles.json` beside the model's files.

    Keys are valid as of the date of roles.json: a model outlives the run whose keys expire.

    Args:
        folder: as `runspec export` makes it.
        run: name of the run.
        root_public_key: the run's root key, in hexadecimal.

    Returns:
        The manifest of the version.

    Raises:
        UserError: a signature or a digest is wrong.
    """
    try:
        data = read_bounded(folder / ROLES_NAME, MAX_ROLES_BYTES)
        manifest = read_bounded(folder / FILE_NAME, MAX_BYTES)
        roles = open_roles(data, root_public_key=root_public_key, run=run, now=issued_at(data))
        opened = open_manifest(manifest, run=run, publishers=roles.publisher)
    except (OSError, BadSignature) as error:
        raise UserError(
            f"cannot be believed: {error}",
            place=str(folder),
            remedy="compare the public key with the one that the run's owner publishes",
        ) from error
    require_published(folder, opened)
    return opened


Policy = TypeVar("Policy")


class VersionedPrefill(Generic[Policy]):
    """A `verify.plugins.PrefillEngine` that keeps the versions of the allowed lag on the device.

    Args:
        spec: the resolved spec.
        weights: where versions come from.
        load: loads a weights directory onto the device.
        has_room: whether a version of this many bytes fits beside the loaded ones. If it does not,
            the least recently used versions are dropped, and loaded again when needed.
        compute: recomputes rollouts under a loaded version, which it is given first; the rest as
            `verify.plugins.PrefillEngine.prefill`.
    """

    def __init__(
        self,
        spec: RunSpec,
        weights: WeightsLocation,
        *,
        load: Callable[[Path], Policy],
        has_room: Callable[[int], bool],
        compute: Callable[..., list[PrefillOutput]],
    ) -> None:
        self._client = WeightsClient(
            weights.urls,
            run=weights.run,
            root_public_key=weights.root_public_key,
            cache_dir=weights.cache_dir,
        )
        self._cache_dir, self._count = weights.cache_dir, spec.grpo.async_level + 1
        self._load, self._has_room, self._compute = load, has_room, compute
        self._paths: dict[int, Path] = {}
        self._loaded: OrderedDict[int, Policy] = OrderedDict()

    def ensure_version(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        """Fetch a version unless it is here; remove those that no lease names any more.

        Raises:
            UserError: not here by the deadline, or not the version that the digest names.
        """
        path = self._client.fetch(version, manifest_digest=manifest_digest, deadline_s=deadline_s)
        self._paths[version] = path
        # Versions from before a restart count: leases still name them, and deltas start from them.
        newest = versions_in(self._cache_dir)[-self._count - 1 :]
        if version in newest:
            for old in set(self._paths) - set(newest):
                del self._paths[old]
            self._client.prune(set(newest))
        return path

    def get(self, version: int) -> Policy:
        """Return a version that `ensure_version` fetched, loaded.

        Raises:
            UserError: of `load`.
        """
        if version not in self._loaded:
            path = self._paths[version]
            size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            while self._loaded and not (len(self._loaded) < self._count and self._has_room(size)):
                self._loaded.popitem(last=False)
            self._loaded[version] = self._load(path)
        self._loaded.move_to_end(version)
        return self._loaded[version]

    def close(self) -> None:
        """Close the client's connections."""
        self._client.close()

    def prefill(
        self,
        version: int,
        inputs: Sequence[PrefillInput],
        *,
        temperature: float,
        truncation: Truncation | None = None,
    ) -> list[PrefillOutput]:
        policy = self.get(version)
        return self._compute(policy, inputs, temperature=temperature, truncation=truncation)


def publish_problems(
    spec: RunSpec, store: Path, signing: Mapping[str, Any], log: logging.Logger
) -> bool:
    """Publish the files of a run's problems, by their digests; return whether there are any.

    Args:
        spec: of the run.
        store: of its origin.
        signing: key, roles and size of chunks, as `broadcast.store.publish_data` takes them.
        log: receives why they cannot be published: who has a copy works all the same.
    """
    if spec.supervised is not None:  # nobody trains on its documents elsewhere
        return False
    try:
        found = (source_files(source).values() for source in spec.data.sources)
        files = {file_digest(path): path for path in chain(*found)}
        if files:
            publish_data(store, files, run=spec.name, **signing)
    except (UserError, OSError) as error:
        log.warning("the files of the problems are not published: %s", error)
        return False
    return bool(files)


def fetch_data(
    weights: WeightsLocation, wanted: Mapping[Path, SiteFile], deadline_s: float
) -> None:
    """Fetch files of a run's problems; see `verify.plugins.fetch_data`."""
    run, cache, end = data_run(weights.run), weights.data_dir / ".fetched", monotonic() + deadline_s
    root = weights.root_public_key
    with WeightsClient(weights.urls, run=run, root_public_key=root, cache_dir=cache) as client:
        latest = client.latest(None, deadline_s)
        version, digest = (0, None) if latest is None else (latest.version, latest.manifest_digest)
        folder = client.fetch(version, manifest_digest=digest, deadline_s=end - monotonic())
        try:
            for path, file in wanted.items():
                published = folder / file.digest
                if not published.exists() or digest_file(published) != file.digest:
                    raise UserError(
                        f"{file.path} of source {file.source}: published are other bytes than the "
                        f"coordinator lists ({file.digest[:16]})",
                        place=", ".join(weights.urls),
                        remedy="start publisher and coordinator again: it changed since",
                    )
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                try:
                    path.hardlink_to(published)
                except OSError:  # the file system has none
                    shutil.copyfile(published, path)
        finally:
            client.prune(set())  # the files stay under their other names
