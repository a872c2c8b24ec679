"""The commands that docs/site.md shows, and machines to call them on.

Every machine is a folder. `scp` copies between them, and a command that is called on a machine runs
in a mount namespace in which the run directories do not exist, unless the machine is the trunk's.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "site.md"
ADMIN, TRUNK = "admin", "trunk"
BY_HAND = "Without a cluster"
RAY = "On a Ray cluster of H200 nodes"
_BLOCK = re.compile(r"^ *```sh\n *# on (\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def commands(section: str = BY_HAND) -> list[tuple[str, list[str]]]:
    """(machine, words) of each command below a heading, in the order of the page."""
    _, _, below = PAGE.read_text().partition(f"\n## {section}\n")
    return [
        (machine, shlex.split(line))
        for machine, text in _BLOCK.findall(below.partition("\n## ")[0])
        for line in text.splitlines()
        if line.strip()
    ]


def command_on(machine: str, start: str, section: str = BY_HAND) -> list[str]:
    """The first command of a machine that begins so."""
    found = (words for on, words in commands(section) if on == machine)
    return next(words for words in found if " ".join(words).startswith(start))


def unit() -> str:
    """The unit for systemd."""
    return PAGE.read_text().partition("```ini\n")[2].partition("```")[0]


def hidden(folder: Path) -> list[str]:
    """What a command line begins with, in whose eyes a folder is empty; needs mount namespaces."""
    own = [] if os.geteuid() == 0 else ["--map-root-user"]
    mount = 'mount -t tmpfs none "$0" && exec "$@"'
    return ["unshare", *own, "--mount", "--", "sh", "-c", mount, str(folder)]


@dataclass(frozen=True)
class Machines:
    """Machines as folders.

    Args:
        folder: of all but the trunk's.
        trunk: the trunk's own; run directories lie in `runs` below.
    """

    folder: Path
    trunk: Path

    @property
    def runs(self) -> Path:
        return self.trunk / "runs"

    def on(self, machine: str) -> Path:
        """The folder of a machine."""
        folder = self.trunk if machine == TRUNK else self.folder / machine
        folder.mkdir(parents=True, exist_ok=True)
        if machine == ADMIN and not (folder / "specs").exists():
            (folder / "specs").symlink_to(ROOT / "specs")
        return folder

    def call(self, machine: str, words: Sequence[str]) -> str:
        """Calls a command to its end, and returns what it printed."""
        if words[0] == "scp":
            source, target = words[1], words[2].partition(":")
            shutil.copy(self.on(machine) / source, self.on(target[0]) / target[2])
            return ""
        done = subprocess.run(
            self._line(machine, words), cwd=self.on(machine), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, machine: str, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Starts a command, whose output is appended to a file."""
        with log.open("ab") as out:
            return subprocess.Popen(
                self._line(machine, words), cwd=self.on(machine), stdout=out, stderr=out
            )

    def _line(self, machine: str, words: Sequence[str]) -> list[str]:
        assert words[0] == "runspec", words
        line = [sys.executable, "-m", *words]
        if machine == TRUNK:
            return line
        self.runs.mkdir(parents=True, exist_ok=True)
        return [*hidden(self.runs), *line]
