"""A test double of a cluster: JobSet controller, kubelets and DNS, without images.

Every pod has a network namespace of its own on one bridge, a hostname, a mount namespace with a
copy-on-write root, and a process namespace in which the container's command is process 1. Names of
pods and Services are in /etc/hosts. A Service has its pod's address, and must not change ports.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.harness import SMALL, TARGET_SHORT
from tests.runspec.cli.in_process import runspec

Object = dict[str, Any]
BIN = Path(sys.executable).parent
IMAGE_ENV = {"PATH": f"{BIN}:/usr/sbin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
"""Environment that the images have."""
STOP_S = 20.0


@dataclass
class Pod:
    """A pod of a job, over all the times that its container is started."""

    group: str
    index: int
    host: str
    """Its name in DNS."""
    address: str
    spec: Object
    labels: Mapping[str, str]
    namespace: str
    folder: Path
    """Root, volumes and log lie below."""
    process: subprocess.Popen[bytes] | None = None
    exits: list[int] = field(default_factory=list)
    """Exit codes so far."""

    @property
    def container(self) -> Object:
        [container] = self.spec["containers"]
        made: Object = container
        return made

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def process_1(self) -> int:
        """The container's command, as this process numbers it."""
        assert self.process is not None
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


class FakeKubelet:
    """Runs the objects of one run.

    Args:
        objects: all that is applied; the JobSet is the last.
        folder: for volumes, roots and logs.
    """

    def __init__(self, objects: Sequence[Object], folder: Path) -> None:
        self._objects, self._folder, self._jobset = objects, folder, objects[-1]
        self._net = f"fk{os.getpid()}"
        self.pods = list(self._make_pods())
        self._hosts = self._names()

    def __enter__(self) -> FakeKubelet:
        try:
            self._make_network()
        except subprocess.CalledProcessError as error:
            self._remove_network()
            what = error.stderr.decode().strip()
            raise AssertionError(
                f"this test needs network and mount namespaces, which root has on Linux: {what}"
            ) from error
        return self

    def __exit__(self, *error: object) -> None:
        for pod in self.pods:
            self.end(pod)
        self._remove_network()

    def pod(self, group: str, index: int = 0) -> Pod:
        return next(pod for pod in self.pods if (pod.group, pod.index) == (group, index))

    def steps(self, timeout_s: float) -> Iterator[None]:
        """Drives the jobs until the one that the success policy names is done.

        Between two looks, the caller has its turn.

        Raises:
            AssertionError: it took too long, or a job failed.
        """
        deadline = time.monotonic() + timeout_s
        started: set[str] = set()
        [decisive] = self._jobset["spec"]["successPolicy"]["targetReplicatedJobs"]
        while not self._done(decisive):
            assert time.monotonic() < deadline, f"not done in {timeout_s} s\n{self.logs()}"
            for job in self._jobset["spec"]["replicatedJobs"]:
                waits = [after["name"] for after in job.get("dependsOn", ())]
                if job["name"] not in started and all(map(self._ready, waits)):
                    started.add(job["name"])
                    for pod in self._of(job["name"]):
                        self._start(pod)
            for pod in self.pods:
                self._watch(pod)
            yield
            time.sleep(0.2)

    def end(self, pod: Pod, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends a pod as its deletion does: SIGTERM, then SIGKILL."""
        if pod.process is None or pod.process.poll() is not None:
            return
        os.kill(pod.process_1(), how)
        try:
            pod.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pod.process.kill()
            pod.process.wait()

    def execute(self, pod: Pod, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in a pod's container, as `kubectl exec` does."""
        target = ("--target", str(pod.process_1()), "--all", "--root", "--wd=/")
        env = [f"{name}={value}" for name, value in self.environment(pod).items()]
        words = ["nsenter", *target, "env", "-i", *env, *command]
        return subprocess.run(words, capture_output=True, text=True)

    def logs(self) -> str:
        tails = {pod.host: pod.log.read_text()[-1500:] for pod in self.pods if pod.log.exists()}
        return "\n".join(f"== {host}\n{tail}" for host, tail in tails.items())

    def _make_pods(self) -> Iterator[Pod]:
        name, number = self._jobset["metadata"]["name"], 2
        for job in self._jobset["spec"]["replicatedJobs"]:
            template = job["template"]["spec"]["template"]
            for i in range(job["template"]["spec"]["completions"]):
                host = f"{name}-{job['name']}-0-{i}"
                folder = self._folder / host
                (folder / "root").mkdir(parents=True)
                yield Pod(
                    group=job["name"],
                    index=i,
                    host=f"{host}.{self._jobset['spec']['network']['subdomain']}",
                    address=f"10.88.0.{number}",
                    spec=template["spec"],
                    labels=template["metadata"]["labels"],
                    namespace=f"{self._net}p{number}",
                    folder=folder,
                )
                number += 1

    def _names(self) -> str:
        lines = ["127.0.0.1 localhost"]
        lines += [f"{pod.address} {pod.host} {pod.host.split('.')[0]}" for pod in self.pods]
        for service in self._kind("Service").values():
            selector = service["spec"]["selector"].items()
            [pod] = [pod for pod in self.pods if selector <= pod.labels.items()]
            exposed = {each["containerPort"] for each in pod.container["ports"]}
            for port in service["spec"]["ports"]:
                assert port["port"] == port["targetPort"] and port["port"] in exposed
            lines.append(f"{pod.address} {service['metadata']['name']}")
        return "\n".join([*lines, ""])

    def _kind(self, kind: str) -> dict[str, Object]:
        return {each["metadata"]["name"]: each for each in self._objects if each["kind"] == kind}

    def _of(self, group: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.group == group]

    def _done(self, group: str) -> bool:
        return all(pod.exits[-1:] == [0] for pod in self._of(group))

    def _ready(self, group: str) -> bool:
        return all(self._probed(pod) for pod in self._of(group))

    def _probed(self, pod: Pod) -> bool:
        if pod.process is None or pod.process.poll() is not None:
            return False
        port = pod.container["readinessProbe"]["tcpSocket"]["port"]
        look = ["bash", "-c", f"exec 3<>/dev/tcp/{pod.address}/{port}"]
        found = subprocess.run(["ip", "netns", "exec", self._net, *look], capture_output=True)
        return found.returncode == 0

    def _watch(self, pod: Pod) -> None:
        """Starts a container or a pod again as the Job says."""
        if pod.process is None or (code := pod.process.poll()) is None:
            return
        pod.process = None
        pod.exits.append(code)
        if code != 0:
            job = next(
                each["template"]["spec"]
                for each in self._jobset["spec"]["replicatedJobs"]
                if each["name"] == pod.group
            )
            final = [
                rule["onExitCodes"]["values"]
                for rule in job.get("podFailurePolicy", {"rules": []})["rules"]
                if rule["action"] == "FailJob"
            ]
            fails = len(pod.exits) > job["backoffLimit"] or any(code in each for each in final)
            assert not fails, f"{pod.host} failed with {code}\n{self.logs()}"
            self._start(pod)

    def _start(self, pod: Pod) -> None:
        script = pod.folder / "start.sh"
        script.write_text("\n".join(["set -e", *self._script(pod), ""]))
        with pod.log.open("ab") as log:
            pod.process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", pod.namespace),
                    *("unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child"),
                    *("sh", str(script)),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def _script(self, pod: Pod) -> Iterator[str]:
        """Makes the container's root, and becomes its command there."""
        top, root = pod.folder, pod.folder / "root"
        yield shlex.join(["hostname", pod.host.split(".")[0]])
        for name in ("upper", "work"):
            (top / name).mkdir(exist_ok=True)
        options = f"lowerdir=/,upperdir={top / 'upper'},workdir={top / 'work'}"
        yield shlex.join(["mount", "-t", "overlay", "overlay", "-o", options, str(root)])
        yield f"mount -t proc proc {root}/proc && mount --rbind /sys {root}/sys"
        yield f"mount --rbind /dev {root}/dev && mount -t tmpfs tmpfs {root}/dev/shm"
        yield f"mount -t tmpfs tmpfs {root}/tmp"
        hosts = top / "hosts"
        hosts.write_text(self._hosts)
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        mounts = [(hosts, "/etc/hosts", False)]
        for mount in pod.container["volumeMounts"]:
            source = self._volume(pod, volumes[mount["name"]])
            if "subPathExpr" in mount:
                source /= _expanded(mount["subPathExpr"], self.environment(pod))
                yield f"mkdir -p {root}{Path(mount['mountPath']).parent}"
                yield f"touch {root}{mount['mountPath']}"
                mounts.append((source, mount["mountPath"], mount["readOnly"]))
                continue
            yield f"mkdir -p {root}{mount['mountPath']}"
            mounts.append((source, mount["mountPath"], mount["readOnly"]))
        for source, path, read_only in mounts:
            yield shlex.join(["mount", "--bind", str(source), f"{root}{path}"])
            if read_only:
                yield f"mount -o remount,bind,ro {root}{path}"
        env = self.environment(pod)
        command = [_expanded(word, env) for word in pod.container["command"]]
        words = [f"{name}={value}" for name, value in env.items()]
        yield shlex.join(["exec", "chroot", str(root), "env", "-i", *words, *command])

    def _volume(self, pod: Pod, volume: Object) -> Path:
        """The folder that is mounted; a claim is one folder for all pods."""
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            assert claim in self._kind("PersistentVolumeClaim")
            made = self._folder / "claims" / claim
            made.mkdir(parents=True, exist_ok=True)
            return made
        made = pod.folder / "volumes" / volume["name"]
        made.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            for name, text in self._kind("ConfigMap")[volume["configMap"]["name"]]["data"].items():
                (made / name).write_text(text)
        if "secret" in volume:
            secret = self._kind("Secret")[volume["secret"]["secretName"]]
            for name, text in secret["data"].items():
                (made / name).write_bytes(b64decode(text))
        return made

    def environment(self, pod: Pod) -> dict[str, str]:
        """A container's, with what GKE adds where a Job has several pods with TPUs."""
        env = {each["name"]: each["value"] for each in pod.container["env"]}
        hosts = [each.host for each in self._of(pod.group)]
        limits = pod.container.get("resources", {}).get("limits", {})
        if "google.com/tpu" in limits and len(hosts) > 1:
            env |= {"TPU_WORKER_ID": str(pod.index), "TPU_WORKER_HOSTNAMES": ",".join(hosts)}
        return {**IMAGE_ENV, "JOB_COMPLETION_INDEX": str(pod.index), **env}

    def _make_network(self) -> None:
        net = self._net
        _ip("netns", "add", net)
        _ip("-n", net, "link", "add", "br0", "type", "bridge")
        _ip("-n", net, "addr", "add", "10.88.0.1/16", "dev", "br0")
        _ip("-n", net, "link", "set", "br0", "up")
        for pod in self.pods:
            port = f"p{pod.address.split('.')[-1]}"
            own = pod.namespace
            _ip("netns", "add", own)
            peer = ("peer", "name", "eth0", "netns", own)
            _ip("-n", net, "link", "add", port, "type", "veth", *peer)
            _ip("-n", net, "link", "set", port, "master", "br0", "up")
            _ip("-n", own, "addr", "add", f"{pod.address}/16", "dev", "eth0")
            _ip("-n", own, "link", "set", "eth0", "up")
            _ip("-n", own, "link", "set", "lo", "up")

    def _remove_network(self) -> None:
        for namespace in (*(pod.namespace for pod in self.pods), self._net):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _expanded(word: str, env: Mapping[str, str]) -> str:
    """A word of a command with $(NAME) replaced, as Kubernetes does it."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), word)


@contextmanager
def on_cluster(folder: Path, overrides: Mapping[str, Any]) -> Iterator[FakeKubelet]:
    """The laptop profile as `runspec render` writes it, before anything is started."""
    values = {**SMALL, **overrides, "placement.kubernetes.image": "runspec:test"}
    words = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    where = ("-o", folder / "manifests", "--runs-dir", folder / "runs")
    done = runspec(
        *("render", TARGET_SHORT, "--profile", "laptop", *words),
        *("--backend", "kubernetes", *where),
    )
    assert done.returncode == 0, done.stderr
    [made] = (folder / "manifests").iterdir()
    with FakeKubelet(list(yaml.safe_load_all(made.read_text())), folder / "kubelet") as kubelet:
        yield kubelet
