"""`apply` and the commands on a run of backend kubernetes, against a small fake API server."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.harness import TARGET_SHORT
from tests.runspec.backends.fake_api_server import FakeApiServer, fake_api_server
from tests.runspec.cli.in_process import runspec

# The client leaves the socket of an exec that the server has ended to the collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
TRUNK = "target-short-trunk-0-0-abcde"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    with fake_api_server() as made:
        config = made.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield made


def apply(folder: Path, *options: str) -> CompletedProcess[str]:
    values = ("backend=kubernetes", "kubernetes.image=runspec:test", "kubernetes.namespace=rl")
    words = [word for value in values for word in ("--set", f"placement.{value}")]
    words += [word for value in options for word in ("--set", value)]
    where = ("--runs-dir", folder / "runs")
    return runspec("apply", TARGET_SHORT, "--profile", "laptop", *words, *where)


def on(folder: Path, command: str, *words: str) -> CompletedProcess[str]:
    return runspec(command, "target-short", *words, "--runs-dir", folder / "runs")


def test_a_run_is_applied_watched_paused_resumed_and_deleted(
    server: FakeApiServer, tmp_path: Path
) -> None:
    # when a run is applied, then the cluster has its objects
    done = apply(tmp_path)
    assert done.returncode == 0, done.stderr
    kinds = {"ConfigMap", "JobSet", "PersistentVolumeClaim", "Secret", "Service"}
    assert server.kinds() == kinds
    # and status is what the trunk's pod says, with its exit code
    server.exit_code = 3
    status = on(tmp_path, "status", "--json")
    own = f"--runs-dir {tmp_path / 'runs'}"
    said = f"runspec status target-short --json {own} {own} --runs-dir /data/runs"
    assert (status.returncode, status.stdout) == (3, f"ran {said}\n")
    assert "a warning" in status.stderr
    assert server.executed == [(TRUNK, said.split())]
    server.exit_code = 0
    # and logs are the trunk's, or of another role's pod
    assert "ran runspec logs" in on(tmp_path, "logs").stdout
    own = on(tmp_path, "logs", "--role", "volunteers-0", "--tail", "2").stdout.splitlines()
    assert own == [f"target-short-volunteers-0-0-abcde line {i}" for i in (3, 4)]
    # and a pause ends the pods, but not the run
    assert on(tmp_path, "pause").returncode == 0
    assert server.jobset()["spec"]["suspend"] is True
    assert "paused" in on(tmp_path, "status").stdout
    assert on(tmp_path, "resume").returncode == 0
    assert server.jobset()["spec"]["suspend"] is False
    # and applied again it keeps its keys
    before = dict(server.objects)
    assert apply(tmp_path).returncode == 0
    assert {name: each for name, each in server.objects.items() if each["kind"] == "Secret"} == {
        name: each for name, each in before.items() if each["kind"] == "Secret"
    }
    # and deleted nothing of it is left, there or here
    assert on(tmp_path, "delete", "--yes").returncode == 0
    assert not server.objects and not list((tmp_path / "runs").iterdir())


def test_apply_goes_on_after_a_pause_and_after_a_failure(
    server: FakeApiServer, tmp_path: Path
) -> None:
    assert apply(tmp_path).returncode == 0
    assert on(tmp_path, "pause").returncode == 0
    assert apply(tmp_path).returncode == 0
    assert server.jobset()["spec"]["suspend"] is False
    # given a JobSet that starts no pod any more
    failed = {"type": "Failed", "status": "True", "message": "the trunk ended with 4"}
    server.jobset()["status"] = {"conditions": [failed]}
    server.jobset()["spec"]["replicatedJobs"] = []
    assert "Failed: the trunk ended with 4" in on(tmp_path, "status").stdout
    # then it is made anew
    assert apply(tmp_path).returncode == 0
    assert "status" not in server.jobset() and server.jobset()["spec"]["replicatedJobs"]


def test_other_runs_of_the_cluster_stay(server: FakeApiServer, tmp_path: Path) -> None:
    assert apply(tmp_path).returncode == 0
    assert apply(tmp_path, "name=other").returncode == 0
    assert on(tmp_path, "delete", "--yes").returncode == 0
    assert {each["metadata"]["labels"]["runspec.dev/run"] for each in server.objects.values()} == {
        "other"
    }


def test_secrets_are_taken_from_the_environment(
    server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "secrets=[{name: TOKEN, from: {env: MY_TOKEN}}]"
    done = apply(tmp_path, secret)
    assert done.returncode == 1 and "the environment has no MY_TOKEN" in done.stderr
    assert not server.objects
    monkeypatch.setenv("MY_TOKEN", "of-mine")
    assert apply(tmp_path, secret).returncode == 0
    made = server.objects["/api/v1/namespaces/rl/secrets/target-short-env"]
    assert b64decode(made["data"]["MY_TOKEN"]) == b"of-mine"


@pytest.mark.parametrize("command", ["status", "logs", "pause", "resume", "delete"])
def test_a_refusal_is_said(server: FakeApiServer, tmp_path: Path, command: str) -> None:
    assert apply(tmp_path).returncode == 0
    server.refusal = "pods is forbidden"
    done = on(tmp_path, command, *(["--yes"] if command == "delete" else []))
    assert done.returncode == 1 and "the cluster refuses: pods is forbidden" in done.stderr
    assert (tmp_path / "runs" / "target-short" / "site.json").exists()


def test_no_cluster_and_a_role_that_is_not_there_are_said(
    server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert apply(tmp_path).returncode == 0
    done = on(tmp_path, "logs", "--role", "volunteers-9")
    assert done.returncode == 1 and "no pod of role 'volunteers-9'" in done.stderr
    server.objects.clear()
    done = on(tmp_path, "status")
    assert done.returncode == 1 and "the cluster has no such run" in done.stderr
    gone = tmp_path / "gone"
    monkeypatch.setenv("KUBECONFIG", str(gone))
    done = on(tmp_path, "status")
    assert done.returncode == 1 and "no cluster is configured" in done.stderr
