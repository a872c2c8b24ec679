"""Lane: spec files and the commands on them. An exit code and a message, never a traceback."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from runspec.core.spec.schema_fields import schema_fields
from tests.fuzz.bounds import OPEN
from tests.runspec.cli.in_process import runspec
from tests.runspec.core.spec.spec_files import EXAMPLES, SMALL

DONE, FINDINGS, UNREADABLE = 0, 1, 2
VALID = [SMALL, *((EXAMPLES / f"{name}.yaml").read_text() for name in ("base", "fleet"))]
"""Specs without an error, each of another size of run."""
COMMANDS = [
    *[["lint", "spec.yaml"]] * 24,
    ["lint", "--format", "json", "spec.yaml"],
    ["lint", "--format", "sarif", "--fail-level", "warning", "spec.yaml"],
    ["lint", "spec.yaml", "sound.yaml"],
    ["lint", "--fix", "spec.yaml"],
    ["lint", "sound.yaml", "--placement", "spec.yaml"],
    ["render", "spec.yaml"],
    ["render", "--show-origin", "spec.yaml"],
    ["plan", "--json", "spec.yaml"],
    ["lock", "--check", "spec.yaml"],
    ["diff", "spec.yaml"],
]
VALUES = [
    *("null", "~", "[]", "{}", "-1", "0", "1e999", "-.inf", ".nan", "010", "0x1F", "12:30", "yes"),
    *("on", "'x'", '"\\u0000"', '"\\ud800"', "${HOME}", "${", "${NOT_SET:?said so}", "${A}${B}"),
    *("&a [*a]", "*nothing", "!!python/object:os.system 1", "!!int 1", "? x", "{a: {b: {c: 1}}}"),
    *("9" * 20, "[{name: x}, {name: x}]", "{x: null}", "{name: 1}", "1e-6", "true", "90m", "0s"),
    *("80GB", "590Mbit/s", "é\u2028", "> folded", "|2", "cpu", "h100-80g", "tpu-v5p", "4x4x4"),
    *("0x0", "hf_" + "A" * 34, "http://user:pw@host:1/", "1" * 70),
    *('# runspec: ignore[no-such] reason="x"', "x # runspec: ignore[bad-value]"),
]
LINES = [
    *("\t", "---", "...", "- ", ": ", "%YAML 1.1", "extends: [spec.yaml]", "extends: spec.yaml"),
    *(
        "extends: [../x]",
        "kind: Placement",
        "version: runspec/v2",
        "version: 1",
        "steps: 1",
        "<<: *a",
    ),
    *("steps: 1\nsteps: 2", "\x00", "\ufeff", "# runspec: ignore[]", "# runspec: ignore"),
    '# runspec: ignore[unknown-key] reason="why"',
]
ODD = [
    *(None, True, [], {}, "", "x", 0, 1, -1, 2, 3, 7, 10**30, 1e-300, 1e300, 0.5, [1], [None]),
    *({"name": None}, [{"name": "a"}], {"a": 1}),
]


def spec_text(rng: random.Random) -> str:
    """A valid spec with some lines, values or characters changed; now and then unchanged."""
    spec = yaml.safe_load(rng.choice(VALID))
    for path in rng.choices(sorted(schema_fields()), k=rng.randrange(4)):
        _set(spec, path, rng)
    text = yaml.safe_dump(spec, sort_keys=False, default_flow_style=rng.random() < 0.1 or None)
    for _ in range(rng.randrange(5)):
        text = _changed(text, rng)
    return text


def _set(spec: dict, path: str, rng: random.Random) -> None:
    """Puts a value of the wrong kind, or of the right kind and absurd, at a path."""
    at: object = spec
    *above, last = [step for step in path.split(".") if step != "<name>"]
    for step in above:
        at = at.get(step) if isinstance(at, dict) else at
        at = rng.choice(at) if isinstance(at, list) and at else at
    if isinstance(at, dict):
        at[last] = rng.choice(ODD)


def _changed(text: str, rng: random.Random) -> str:
    lines = text.splitlines()
    at = rng.randrange(len(lines) + 1)
    match rng.randrange(6):
        case 0:  # a line of something else
            lines.insert(at, " " * rng.choice([0, 0, 2, 4]) + rng.choice(LINES))
        case 1 if at < len(lines):  # another value
            lines[at] = lines[at].partition(":")[0] + ": " + rng.choice(VALUES)
        case 2 if at < len(lines):  # a misspelt key
            cut = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:cut] + lines[at][cut + 1 :]
        case 3:
            del lines[at : at + rng.randrange(3)]
        case 4:
            lines[at:at] = lines[at : at + rng.randrange(4)]
        case _:
            whole = "\n".join(lines)
            cut = rng.randrange(len(whole) + 1)
            patch = rng.choice([*VALUES, *LINES, chr(rng.randrange(0x110000 - 0x800) % 0xD800)])
            return whole[:cut] + patch + whole[cut + rng.randrange(20) :]
    return "\n".join(lines)


def commands_on_specs() -> Callable[[random.Random], bool]:
    """A file that holds a changed spec, or any bytes, and a command that reads it."""
    folder = Path(OPEN.enter_context(TemporaryDirectory()))
    (folder / "sound.yaml").write_text(VALID[1])

    def case(rng: random.Random) -> bool:
        data = spec_text(rng).encode("utf-8", "surrogatepass")
        if rng.random() < 0.1:
            data = rng.randbytes(rng.randrange(200))
        (folder / "spec.yaml").write_bytes(data)
        code, printed = _exit_code(folder, rng.choice(COMMANDS))
        assert code in (DONE, FINDINGS, UNREADABLE), printed
        assert "Traceback" not in printed
        assert code == DONE or printed, "a failure says why"
        return code == DONE

    return case


def _exit_code(folder: Path, arguments: list[str]) -> tuple[int, str]:
    """What a command exits with, and all that it printed. No spec reaches the network."""
    with pytest.MonkeyPatch.context() as patch, chdir(folder):
        patch.setenv("HF_HUB_OFFLINE", "1")
        done = runspec(*arguments)
    return done.returncode, done.stdout + done.stderr
