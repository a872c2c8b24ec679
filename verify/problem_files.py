"""Fetches the files of the spec's sources for a role that draws problems."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.process import not_retried
from runspec.core.spec.schema import RunSpec
from runspec.core.spec.source_files import compare_data_digests, data_digest, file_digest
from verify.client import CoordinatorClient
from verify.formats.joining import Site


def problem_files(
    client: CoordinatorClient, spec: RunSpec, folder: Path, log: logging.Logger
) -> Path | None:
    """Make sure that this machine has the coordinator's files of problems.

    Files with the same contents at the spec's own paths are used in place; others are fetched.

    Args:
        client: client of the coordinator.
        spec: the run's resolved spec.
        folder: folder of fetched files, as <source>/<name>.
        log: receives messages about what is fetched.

    Returns:
        `data_dir` of `verify.plugins.load_task_set`: the folder, or None for the spec's paths.

    Raises:
        RunStopped: the problems would still differ from the coordinator's.
        UserError: the coordinator does not send a file as listed, or the disk is full.
    """
    site = client.site()
    if not site.data:
        return None  # the coordinator cannot read its files
    with suppress(UserError):  # a file is missing
        if data_digest(spec) == site.data:
            return None
    with not_retried():
        if not site.files:
            compare_data_digests(data_digest(spec), site.data, whose="the coordinator")
    _fetch(client, site, folder, log)
    with not_retried():
        compare_data_digests(data_digest(spec, folder), site.data, whose="the coordinator")
    return folder


def _fetch(client: CoordinatorClient, site: Site, folder: Path, log: logging.Logger) -> None:
    wanted = {folder / file.source / file.path: file for file in site.files}
    missing = {
        path: file
        for path, file in wanted.items()
        if not path.is_file() or file_digest(path) != file.digest
    }
    if missing:
        total = sum(file.bytes for file in missing.values()) / 1e6
        log.info("fetching %d files of problems, %.1f MB", len(missing), total)
    for path, file in missing.items():
        client.fetch_data(file, path)
