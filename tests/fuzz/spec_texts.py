"""Texts that a spec file may hold: valid specs, broken ones, and what is no spec at all."""

from __future__ import annotations

import random

import yaml
from hypothesis import strategies as st

from runspec.core.spec.schema_fields import schema_fields
from tests.runspec.lint.generated import valid_spec

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


@st.composite
def spec_texts(draw: st.DrawFn) -> str:
    """A valid spec with some lines, values or characters changed; now and then unchanged."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    spec = valid_spec(rng.randrange(500))
    for path in draw(st.lists(st.sampled_from(sorted(schema_fields())), max_size=3)):
        _set(spec, path, rng)
    text = yaml.safe_dump(spec, sort_keys=False, default_flow_style=rng.random() < 0.1 or None)
    for _ in range(draw(st.integers(0, 4))):
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
