"""Stand-ins for clusters: a Kubernetes API server (objects, pods, logs, exec), Slurm's commands."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

Object = dict[str, Any]
TOKEN = "of-a-test"
CORE, JOBSETS = "/api/v1/namespaces/{ns}", "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{ns}/jobsets"


@dataclass
class FakeApiServer:
    """What the server has, and what it was asked."""

    url: str = ""
    objects: dict[str, Object] = field(default_factory=dict)
    """By path."""
    executed: list[tuple[str, list[str]]] = field(default_factory=list)
    """Pod and command of each exec."""
    exit_code: int = 0
    """Of what exec runs."""
    refusal: str | None = None
    """Message with which it refuses everything."""

    def kinds(self) -> set[str]:
        return {each["kind"] for each in self.objects.values()}

    def jobset(self) -> Object:
        [found] = [each for each in self.objects.values() if each["kind"] == "JobSet"]
        return found

    def kubeconfig(self, path: Path) -> Path:
        """Writes a file that leads to this server."""
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": self.url}}],
                    "users": [{"name": "u", "user": {"token": TOKEN}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        return path

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(f"{CORE}/pods", self._pods)
        app.router.add_get(f"{CORE}/pods/{{pod}}/log", self._log)
        app.router.add_get(f"{CORE}/pods/{{pod}}/exec", self._exec)
        for path in (f"{CORE}/{{plural}}", JOBSETS):
            app.router.add_delete(path, self._delete)
            app.router.add_patch(f"{path}/{{name}}", self._patch)
            app.router.add_get(f"{path}/{{name}}", self._get)
            app.router.add_delete(f"{path}/{{name}}", self._delete_one)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        if self.refusal is not None:
            return _status(403, self.refusal)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _patch(self, request: web.Request) -> web.Response:
        body = yaml.safe_load(await request.text())
        if request.content_type == "application/apply-patch+yaml":
            assert request.query["fieldManager"] and request.query["force"] == "true"
            metadata = body["metadata"]
            assert metadata["name"] == request.match_info["name"]
            assert metadata["namespace"] == request.match_info["ns"]
            before = self.objects.get(request.path, {})
            kept = {name: before[name] for name in ("status",) if name in before}
            if before.get("spec", {}).get("suspend"):
                body["spec"]["suspend"] = True  # another manager's field
            self.objects[request.path] = body | kept
        else:
            assert request.content_type == "application/merge-patch+json"
            self.objects[request.path]["spec"].update(body["spec"])
        return web.json_response(self.objects[request.path])

    async def _get(self, request: web.Request) -> web.Response:
        found = self.objects.get(request.path)
        return _status(404, "not found") if found is None else web.json_response(found)

    async def _delete(self, request: web.Request) -> web.Response:
        doomed = [
            path
            for path, each in self.objects.items()
            if path.startswith(f"{request.path}/") and _selected(request, each["metadata"])
        ]
        for path in doomed:
            del self.objects[path]
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _delete_one(self, request: web.Request) -> web.Response:
        del self.objects[request.path]
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _pods(self, request: web.Request) -> web.Response:
        pods = [pod for pod in self._running() if _selected(request, pod["metadata"])]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "items": pods})

    def _running(self) -> Iterator[Object]:
        for jobset in [each for each in self.objects.values() if each["kind"] == "JobSet"]:
            if jobset["spec"].get("suspend"):
                continue
            for job in jobset["spec"]["replicatedJobs"]:
                template = job["template"]["spec"]
                for i in range(template["completions"]):
                    labels = template["template"]["metadata"]["labels"]
                    index = {"batch.kubernetes.io/job-completion-index": str(i)}
                    metadata = {
                        "name": f"{jobset['metadata']['name']}-{job['name']}-0-{i}-abcde",
                        "labels": {**labels, **index},
                        "creationTimestamp": "2026-01-01T00:00:00Z",
                    }
                    yield {"metadata": metadata, "status": {"phase": "Running"}}

    async def _log(self, request: web.Request) -> web.Response:
        lines = [f"{request.match_info['pod']} line {i}" for i in range(5)]
        tail = int(request.query.get("tailLines", len(lines)))
        return web.Response(text="".join(f"{line}\n" for line in lines[len(lines) - tail :]))

    async def _exec(self, request: web.Request) -> web.WebSocketResponse:
        """Says on stdout what it would run: channels 1, 2 and 3 are stdout, stderr and the end."""
        command = request.query.getall("command")
        self.executed.append((request.match_info["pod"], command))
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        await socket.send_bytes(b"\x01" + f"ran {' '.join(command)}\n".encode())
        await socket.send_bytes(b"\x02a warning\n")
        causes = [{"reason": "ExitCode", "message": str(self.exit_code)}]
        failure = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
        end = failure if self.exit_code else {"status": "Success"}
        await socket.send_bytes(b"\x03" + json.dumps(end).encode())
        await socket.close()
        return socket


@contextmanager
def fake_api_server() -> Iterator[FakeApiServer]:
    """A server on a free port, in a thread."""
    server, loop, up = FakeApiServer(), asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(server.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        up.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    up.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        with warnings.catch_warnings():
            # The client leaves the socket of an exec that the server has ended to the collector.
            warnings.filterwarnings("ignore", "unclosed <socket", ResourceWarning)
            gc.collect()


def _selected(request: web.Request, metadata: Mapping[str, Any]) -> bool:
    wanted = dict(word.split("=") for word in request.query["labelSelector"].split(","))
    return wanted.items() <= metadata["labels"].items()


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "message": message}, status=code)


def cluster(folder: Path, commands: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job's script, in which stand-ins come first."""
    folder.mkdir(exist_ok=True)
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "PATH": path}
