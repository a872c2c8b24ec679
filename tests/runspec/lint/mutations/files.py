"""What breaks a file before any rule looks at it: YAML, keys, values, names, suppressions."""

from __future__ import annotations

from tests.runspec.lint.mutations.changes import LAPTOP, Mutation, lines, put

FILES = {
    "yaml": Mutation(write=lines("a: [1")),
    "extends": Mutation(write=lines("extends: [nowhere.yaml]")),
    "duplicate-key": Mutation(write=lines("steps: 77")),
    "duplicate-name": Mutation(lambda spec: spec["reward"].append(dict(spec["reward"][0]))),
    "unknown-name": Mutation(write=lines("secrets: {nobody: null}"), kinds=LAPTOP),
    "unknown-key": Mutation(put(algorithm__groupsize=8)),
    "missing-key": Mutation(lambda spec: spec["data"].pop("max_prompt_tokens")),
    "no-seed": Mutation(lambda spec: spec.pop("seed")),
    "wrong-type": Mutation(put(steps="12")),
    "bad-value": Mutation(put(steps=0)),
    "unit": Mutation(put(verify__lease_timeout=60)),
    "ambiguous-scalar": Mutation(
        write=lambda text: text.replace("name: words", "name: 'no'").replace("'no'", "no")
    ),
    "variable": Mutation(put(checkpoints__dir="${NOBODY_SETS_THIS}")),
    "secret-value": Mutation(
        put(
            secrets=[{"name": "TOKEN", "from": {"env": "HOME"}}],
            checkpoints__dir="${HOME}/states",
        )
    ),
    "malformed-suppression": Mutation(write=lines("# runspec: ignore the rest")),
    "suppression-reason": Mutation(
        write=lines("# runspec: ignore[group-size]"), also=frozenset({"unused-suppression"})
    ),
    "unknown-rule": Mutation(write=lines('# runspec: ignore[no-such-rule] reason="x"')),
    "unused-suppression": Mutation(write=lines('# runspec: ignore[group-size] reason="x"')),
}
"""Of `placement-scope` the files are two: see its own test."""
