"""Handlers for everybody: documents, files for volunteers, and the results of evaluations."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.run_files import EVALUATIONS_NAME, evaluation_file, evaluation_files
from runspec.core.signed import BadSignature
from runspec.core.spec.source_files import data_digest, file_digest, source_files
from verify.coordinator.edge.requests import Refusal, read_body, refusing, send_file
from verify.coordinator.handlers.context import RunContext
from verify.formats.evaluation import (
    MAX_EVALUATION_BYTES,
    Evaluated,
    open_evaluation,
    read_evaluations,
)
from verify.formats.joining import MAX_FILES, Site, SiteFile, sign_site, sign_spec

_log = logging.getLogger(__name__)


class SiteHandlers:
    """Spec, roles.json, and the files of the spec's sources for volunteers who have no copy.

    The files of `source_files` are listed at the start. A request names a digest, never a path.

    Args:
        run: the run.
        roles: the signed roles.json.
        weights: public URLs of relays and origin.
    """

    def __init__(self, run: RunContext, roles: bytes, weights: Sequence[str]) -> None:
        self._run, self._weights = run, list(weights)
        self._documents = {"spec": sign_spec(run.spec, run.key), "roles": roles}
        self._paths: dict[str, Path] = {}
        self._ready = asyncio.ensure_future(asyncio.to_thread(self._look))

    def routes(self) -> list[web.RouteDef]:
        public = self._run.public
        return [
            public("/v1/{name:spec|roles}", self._document),
            public("/v1/site", self._site),
            public("/v1/data/{digest:[0-9a-f]{64}}", self._data),
        ]

    def close(self) -> None:
        self._ready.cancel()

    async def _document(self, request: web.Request) -> web.StreamResponse:
        body = self._documents[request.match_info["name"]]
        return web.Response(body=body, content_type="application/json")

    async def _site(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=await self._signed_site(), content_type="application/json")

    async def _data(self, request: web.Request) -> web.StreamResponse:
        await self._signed_site()
        path = self._paths.get(request.match_info["digest"])
        if path is None:
            raise Refusal(404, "no file of the data has this digest")
        with self._run.authentication.download(request):
            return await send_file(request, path)

    async def _signed_site(self) -> bytes:
        """Return the signed site, once the files are hashed.

        Raises:
            Refusal: a file was removed meanwhile.
        """
        with refusing(404, OSError, what="the data cannot be read: "):
            return await asyncio.shield(self._ready)

    def _look(self) -> bytes:
        spec, files, digest = self._run.spec, list[SiteFile](), ""
        try:
            if spec.supervised is None:  # else nobody trains on its documents elsewhere
                files, digest = self._files(), data_digest(spec)
        except UserError as error:
            # Workers with a copy of the data still work; workers without it fail with a message.
            _log.warning("volunteers cannot fetch the data here: %s", error)
            files = []
        if files:
            total = sum(file.bytes for file in files)
            _log.info("volunteers can fetch %d files of data, %d bytes", len(files), total)
        return sign_site(Site(spec.name, self._weights, files, digest), self._run.key)

    def _files(self) -> list[SiteFile]:
        files = []
        for source in self._run.spec.data.sources:
            for name, path in source_files(source).items():
                digest = file_digest(path)
                self._paths[digest] = path
                files.append(SiteFile(source.name, name, path.stat().st_size, digest))
        if len(files) > MAX_FILES:
            raise UserError(
                f"{len(files)} files, volunteers can be given {MAX_FILES}",
                place="data.sources",
                remedy="put the rows into fewer files",
            )
        return files


class Evaluations:
    """The evaluator's results, one file for each evaluation of a version, the first one sent.

    Args:
        run: the run.
    """

    def __init__(self, run: RunContext) -> None:
        self._run, self._run_dir = run, run.journal.run_dir
        self._names = {each.name for each in run.spec.evaluations}
        found = read_evaluations(evaluation_files(self._run_dir))
        self._known = {(e.evaluation, e.version): _shown(e) for e in found}

    def routes(self) -> list[web.RouteDef]:
        get = self._run.public("/v1/evaluations", self._get)
        return [get, web.post("/v1/evaluations", self._add)]

    async def _get(self, request: web.Request) -> web.StreamResponse:
        """Send figures without their problems."""
        document = json.dumps({"evaluations": list(self._known.values())}).encode()
        return await self._run.send_json(request, document)

    async def _add(self, request: web.Request) -> web.StreamResponse:
        """Store a result; one that is there stays."""
        caller = self._run.authentication.caller(request)
        if caller.key not in self._run.roles.evaluator:
            raise Refusal(403, "roles.json does not name this key as an evaluator's")
        document = await read_body(request, caller, MAX_EVALUATION_BYTES)
        with refusing(400, BadSignature):
            result = open_evaluation(document, evaluators=frozenset({caller.key}))
        if result.run != self._run.spec.name or result.evaluation not in self._names:
            raise Refusal(400, "a result of another run or evaluation")
        if result.version > self._run.spec.steps:
            raise Refusal(400, f"version {result.version} of a run of {self._run.spec.steps} steps")
        key = (result.evaluation, result.version)
        if key not in self._known:
            path = evaluation_file(self._run_dir, *key)
            with refusing(503, OSError, UserError):  # a full disk: the evaluator tries again
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, document)
            self._known[key] = _shown(result)
            _log.info("%s of version %d is stored in %s", *key, EVALUATIONS_NAME)
        return web.json_response({}, status=202)


def _shown(result: Evaluated) -> Mapping[str, Any]:
    figures = {name: [f.value, f.low, f.high] for name, f in result.figures.items()}
    return {
        "evaluation": result.evaluation,
        "version": result.version,
        "finished": result.finished,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "faults": result.faults,
        "figures": figures,
    }
