"""The published `shardcast` client downloads whole versions from our origin and our relay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from broadcast.app import shardcast_distribution
from broadcast.manifest import Chunk, ObjectInfo, WeightsManifest
from broadcast.server import ServerOptions
from runspec.core.hashing import digest_bytes
from tests.waiting import eventually

from .conftest import Run, weights

PACKAGE = Path(__file__).parents[2] / ".venv" / "shardcast"
TOKEN = "0123456789abcdef"


def _why_not() -> str | None:
    if not (PACKAGE / "shardcast").is_dir():
        return "`make shardcast` was not run"
    # The client looks for wget without a PATH, and would have a system's package manager bring it.
    found = subprocess.run(["which", "wget"], env={}, capture_output=True, check=False)
    return None if found.returncode == 0 else "wget is not installed"


needs_client = pytest.mark.skipif(_why_not() is not None, reason=_why_not() or "")

Client = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    """Runs the client with nothing but the standard library and what it depends on.

    It writes beside its own source, so each test has a copy; and to /tmp/dummy.bin.
    """
    copy = tmp_path / "shardcast-client"
    shutil.copytree(PACKAGE / "shardcast", copy / "shardcast")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(map(str, (copy, PACKAGE))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", "-m", "shardcast.client_node", *map(str, arguments)],
            env=environment | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@needs_client
@pytest.mark.parametrize("kind", ["origin", "relay"])
def test_the_published_client_downloads_a_version(
    run: Run, client: Client, tmp_path: Path, kind: str
) -> None:
    # given two whole versions
    run.publish(0, weights())
    run.publish(1, weights(seed=1))
    origin = run.origin()
    url = origin.url if kind == "origin" else run.relay(origin.url).url
    eventually(lambda: httpx.get(f"{url}/demo/latest.json").status_code == 200, "it is announced")
    # when the client of the published package downloads the newer one
    done = client(
        *("--servers", f"{url}/demo/shardcast", "--version", "v1"),
        *("--output-file", tmp_path / "got.bin"),
    )
    # then it has the weights, and found its own checksum of them right
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "got.bin").read_bytes() == weights(seed=1)["model.safetensors"]
    assert "Checksum verification passed" in done.stderr


@needs_client
def test_the_published_client_brings_a_token_from_wgets_settings(
    run: Run, client: Client, tmp_path: Path
) -> None:
    run.publish(0, weights())
    tokens = tmp_path / "tokens"
    tokens.write_text(f"eu {TOKEN}\n")
    tokens.chmod(0o600)
    url = f"{run.origin(options=ServerOptions(tokens_file=tokens)).url}/demo/shardcast"
    settings = tmp_path / "wgetrc"
    settings.write_text(f"header = Authorization: Bearer {TOKEN}\n")
    wanted = ("--servers", url, "--version", "v0", "--output-file", tmp_path / "got.bin")

    assert client(*wanted).returncode != 0
    assert client(*wanted, WGETRC=str(settings)).returncode == 0

    assert (tmp_path / "got.bin").read_bytes() == weights()["model.safetensors"]


@pytest.mark.parametrize("kind", ["origin", "relay"])
def test_before_a_version_is_out(run: Run, kind: str) -> None:
    """The client measures a server before it asks for anything: it must be able to start early."""
    (run.store / "demo").mkdir(parents=True)
    (run.store / "demo" / "roles.json").write_bytes(run.roles)
    origin = run.origin()
    url = origin.url if kind == "origin" else run.relay(origin.url).url

    probe = httpx.get(f"{url}/demo/shardcast/data1.bin")
    listed = httpx.get(f"{url}/demo/shardcast/distribution.txt")

    assert (probe.status_code, len(probe.content) > 0) == (200, True)
    assert (listed.status_code, listed.text) == (200, "")
    for wrong in ("v0/shard_00001.bin", "v0/shard_00000.bin", "v0/shard_1.bin", "v0"):
        assert httpx.get(f"{url}/demo/shardcast/{wrong}").status_code == 404


@pytest.mark.parametrize("kind", ["origin", "relay"])
def test_shards_are_the_chunks_in_order(run: Run, kind: str) -> None:
    run.publish(3, weights())
    origin = run.origin()
    url = origin.url if kind == "origin" else run.relay(origin.url).url
    folder = f"{url}/demo/shardcast"
    eventually(lambda: httpx.get(f"{folder}/distribution.txt").text != "", "it is listed")

    name, _, rest = httpx.get(f"{folder}/distribution.txt").text.partition(": ")
    checksum, _, count = rest.strip().partition("|")
    shards = [
        httpx.get(f"{folder}/v3/shard_{number:05d}.bin") for number in range(1, int(count) + 1)
    ]

    assert (name, checksum) == ("v3", digest_bytes(weights()["model.safetensors"]))
    assert b"".join(s.content for s in shards) == weights()["model.safetensors"]
    assert httpx.get(f"{folder}/v3/shard_{int(count) + 1:05d}.bin").status_code == 404
    assert httpx.get(f"{folder}/v3/shard_00000.bin").status_code == 404


def manifest(version: int, objects: dict[str, int], *, files: tuple[str, ...]) -> WeightsManifest:
    """A manifest with objects of so many chunks."""
    infos = {
        name: ObjectInfo(
            count, name[0] * 64, tuple(Chunk(f"{number:064x}", 1) for number in range(count))
        )
        for name, count in objects.items()
    }
    return WeightsManifest("demo", version, None, None, {}, files, infos, {})


ONE_FILE = {"model.safetensors": 3, "config.json": 1}


def test_only_versions_of_one_weights_file_are_listed() -> None:
    held = {
        12: manifest(12, ONE_FILE, files=("model.safetensors",)),
        2: manifest(2, ONE_FILE, files=()),
        3: manifest(3, {"config.json": 1}, files=("model.safetensors",)),  # a delta version
        4: manifest(4, {"a.safetensors": 1, "b.safetensors": 1}, files=("a.safetensors",)),
        5: manifest(5, {"config.json": 1}, files=()),
    }

    assert shardcast_distribution(held) == f"v2: {'m' * 64}|3\nv12: {'m' * 64}|3\n"
