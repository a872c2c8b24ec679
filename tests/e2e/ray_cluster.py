"""A Ray cluster of several nodes on one machine, each in namespaces of its own.

A node has an address of its own on a bridge, sees its own processes only, and has folders of its
own where others have theirs: SITE (the run directory on the trunk's node), /tmp/ray and a home.
Killing the first process of its namespace ends all of it at once, as a loss of power does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from runspec.local.endpoints import port_answers
from tests.site_page import RAY, command_on
from tests.waiting import eventually

CLIENT_PORT = 10001
_STARTED = "Ray runtime started"
"""What `ray start` prints once the head knows the node."""
_IN_NODE = """
set -e
mount --bind "$1" "$2"
mount -t tmpfs tmpfs "$3"
mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray
hostname "$4"
mount --bind "$5" /etc/hosts
shift 5
exec "$@"
"""


def _root(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr} (namespaces need root)"


def _free_net() -> str:
    """Returns the first three numbers of a /24 network that no interface of this machine has.

    Another cluster may run here, or one whose process was killed may have left its bridge.
    """
    shown = subprocess.run(
        ["ip", "-brief", "-4", "addr"], capture_output=True, text=True, check=True
    )
    for number in range(1, 255):
        if f" 10.231.{number}." not in shown.stdout:
            return f"10.231.{number}"
    raise AssertionError("every network 10.231.*.0/24 has an interface: delete the bridges ray*b")


@dataclass
class Node:
    """One node of the cluster."""

    number: int
    net: str
    """The first three numbers of its address."""
    folder: Path
    """What lies at SITE on this node."""
    site: Path
    hidden: Path
    """Where the folders of all nodes lie, which no node sees."""
    resources: Mapping[str, float]
    process: subprocess.Popen[bytes] | None = None

    @property
    def ip(self) -> str:
        return f"{self.net}.{self.number}"

    @property
    def namespace(self) -> str:
        return f"ray{os.getpid()}n{self.number}"

    @property
    def log(self) -> Path:
        return self.hidden.parent / f"node{self.number}.log"

    def start(self) -> None:
        """Starts the node; the first one is the cluster's head."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shown = command_on("head" if self.number == 1 else "node", "ray start", RAY)
        head = (f"--ray-client-server-port={CLIENT_PORT}", "--include-dashboard=false")
        ray = [
            *(str(Path(sys.executable).with_name("ray")), *shown[1:], "--block"),
            *(head if self.number == 1 else ()),
            *(f"--node-ip-address={self.ip}", "--num-cpus=2", "--disable-usage-stats"),
            "--object-store-memory=80000000",
            f"--resources={json.dumps(dict(self.resources))}",
        ]
        name, hosts = f"node{self.number}", self.hidden.parent / f"hosts{self.number}"
        names = (
            f"127.0.0.1 localhost\n{self.net}.1 head\n{self.ip} {name}\n"  # Gloo asks for its own
        )
        hosts.write_text(names)
        given = (str(self.folder), str(self.site), str(self.hidden), name, str(hosts))
        env = {**os.environ, "HOME": str(self.site), "RAY_health_check_period_ms": "1000"}
        env |= {"RAY_health_check_failure_threshold": "3", "RAY_DEDUP_LOGS": "0"}
        # No process for each core, for tasks; and no niceness of 15, with which actors would get
        # next to nothing of cores that other tests use.
        env |= {"RAY_enable_worker_prestart": "0", "RAY_worker_niceness": "0"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.namespace),
                    *(
                        "unshare",
                        "--mount",
                        "--uts",
                        "--pid",
                        "--fork",
                        "--kill-child",
                        "--mount-proc",
                    ),
                    *("sh", "-c", _IN_NODE, "node", *given, *ray),
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Ends every process of the node at once."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@dataclass
class Cluster:
    """The nodes, the first of them the head.

    Args:
        folder: for everything; short, since sockets lie in it.
        resources: of each node.
    """

    folder: Path
    resources: list[Mapping[str, float]]
    nodes: list[Node] = field(default_factory=list)
    net: str = field(default_factory=_free_net)

    @property
    def site(self) -> Path:
        """Where each node has a folder of its own."""
        return self.folder / "site"

    @property
    def address(self) -> str:
        """For callers that are no node."""
        return f"ray://{self.net}.1:{CLIENT_PORT}"

    def __enter__(self) -> Cluster:
        try:
            return self._start()
        except BaseException:
            self.__exit__()
            raise

    def _start(self) -> Cluster:
        hidden, bridge = self.folder / "nodes", self._bridge
        self.site.mkdir(parents=True)
        hidden.mkdir()
        _root("ip", "link", "add", bridge, "type", "bridge")
        _root("ip", "addr", "add", f"{self.net}.254/24", "dev", bridge)
        _root("ip", "link", "set", bridge, "up")
        for number, resources in enumerate(self.resources, 1):
            node = Node(number, self.net, hidden / str(number), self.site, hidden, resources)
            self.nodes.append(node)
            self._wire(node)
        # One after another: `ray start` gives up after 30 s, too few for several on busy cores.
        for node in self.nodes:
            node.start()
            self._await(node)
        return self

    def __exit__(self, *error: object) -> None:
        for node in self.nodes:
            node.kill()
        for node in self.nodes:
            subprocess.run(["ip", "netns", "del", node.namespace], check=False)
        subprocess.run(["ip", "link", "del", self._bridge], check=False)
        shutil.rmtree(self.folder / "nodes", ignore_errors=True)

    @property
    def _bridge(self) -> str:
        return f"ray{os.getpid() % 100000}b"

    def _wire(self, node: Node) -> None:
        inside, outside = "eth0", f"ray{os.getpid() % 100000}v{node.number}"
        _root("ip", "netns", "add", node.namespace)
        peer = ("peer", "name", inside, "netns", node.namespace)
        _root("ip", "link", "add", outside, "type", "veth", *peer)
        _root("ip", "link", "set", outside, "master", self._bridge, "up")
        within = ("ip", "-n", node.namespace)
        _root(*within, "addr", "add", f"{node.ip}/24", "dev", inside)
        _root(*within, "link", "set", inside, "up")
        _root(*within, "link", "set", "lo", "up")

    def _await(self, node: Node) -> None:
        process = node.process
        assert process is not None
        eventually(
            lambda: (
                _STARTED in node.log.read_text()
                and (node.number > 1 or port_answers(node.ip, CLIENT_PORT, 1.0))
            ),
            f"node {node.number} is up",
            hopeless=lambda: "" if process.poll() is None else "it ended",
            context=lambda: node.log.read_text()[-2000:],
            poll_s=0.5,
        )
