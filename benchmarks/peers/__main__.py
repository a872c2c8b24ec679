"""Makes the peers' environments: `python -m benchmarks.peers install DIR`. With `record` in place
of `install`, writes what the peers there compute to the vectors of `tests/learner_jax/parity`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.peers import HERE, PEERS, VARIABLE, computed
from benchmarks.peers.given import make_given, write_vectors

LIST = HERE.parent / "peers.txt"


def pinned(text: str) -> dict[str, list[str]]:
    """Requirements by the section, `[trl]` or `[tunix]`, that they stand under."""
    sections: dict[str, list[str]] = {peer: [] for peer in PEERS}
    lines: list[str] = []
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("["):
            lines = sections[line.strip("[]")]
        elif line:
            lines.append(line)
    return sections


def install(directory: Path) -> None:
    for peer, requirements in pinned(LIST.read_text()).items():
        venv.create(directory / peer, with_pip=True, symlinks=True)
        # --no-deps: the lists are complete; torch's own would bring CUDA.
        command = [str(directory / peer / "bin" / "python"), "-m", "pip", "install", "--no-deps"]
        subprocess.run([*command, "--quiet", *requirements], check=True, stdout=sys.stderr)
    print(f"export {VARIABLE}={directory}")


def record(directory: Path) -> None:
    given = make_given()
    write_vectors({"given": given, **{peer: computed(peer, given, directory) for peer in PEERS}})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("command", choices=["install", "record"])
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    {"install": install, "record": record}[options.command](options.directory.resolve())


if __name__ == "__main__":
    main()
