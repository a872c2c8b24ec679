"""`${VAR}` and `${VAR:?message}` in values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from runspec.core.spec.findings import Finding
from runspec.core.spec.yaml_nodes import (
    Entry,
    ListNode,
    MapNode,
    Node,
    ScalarNode,
    object_name,
    resolve_scalar,
)

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::\?([^}]*))?\}")


def interpolate(root: MapNode, environ: Mapping[str, str], findings: list[Finding]) -> MapNode:
    """The tree with its variables filled in.

    Only the values that survived the merge are looked at. A plain scalar takes the type of what it
    became (`steps: ${STEPS}` is a number), a quoted one stays text; a variable never brings
    structure. `${VAR:?message}` refuses an empty variable too, with its own message.

    Variables that `secrets` names are found and never filled in: a finding that quotes a value
    would show the secret.
    """
    filled = _Filler(environ, findings, _secret_variables(root)).node(root, "")
    assert isinstance(filled, MapNode)
    return filled


def _secret_variables(root: MapNode) -> frozenset[str]:
    """The environment variables that hold the spec's secrets."""
    secrets = root.entries["secrets"].value if "secrets" in root.entries else None
    items = secrets.items if isinstance(secrets, ListNode) else ()
    sources = [_entry(item, "from") for item in items]
    names = [_entry(source, "env") for source in sources]
    return frozenset(str(name.value) for name in names if isinstance(name, ScalarNode))


def _entry(node: Node | None, key: str) -> Node | None:
    entry = node.entries.get(key) if isinstance(node, MapNode) else None
    return entry.value if entry else None


class _Filler:
    def __init__(
        self, environ: Mapping[str, str], findings: list[Finding], secrets: frozenset[str]
    ) -> None:
        self._environ = environ
        self._findings = findings
        self._secrets = secrets

    def node(self, node: Node, path: str) -> Node:
        if isinstance(node, MapNode):
            dot = f"{path}." if path else ""
            entries = {
                key: Entry(entry.key_place, self.node(entry.value, f"{dot}{key}"))
                for key, entry in node.entries.items()
            }
            return replace(node, entries=entries)
        if isinstance(node, ListNode):
            items = [
                self.node(item, f"{path}.{object_name(item) or index}")
                for index, item in enumerate(node.items)
            ]
            return ListNode(tuple(items), node.place)
        if isinstance(node.value, str) and "${" in node.value:
            return self._scalar(node, node.value, path)
        return node

    def _scalar(self, node: ScalarNode, text: str, path: str) -> ScalarNode:
        before = len(self._findings)
        if "${" in _VARIABLE.sub("", text):
            message = "a variable is written ${NAME} or ${NAME:?message}"
            self._report(node, message, path)
        filled = _VARIABLE.sub(lambda match: self._value(match, node, path), text)
        try:
            value = resolve_scalar(filled) if node.plain else filled
        except ValueError as error:
            self._report(node, str(error), path)
            value = None
        if len(self._findings) > before:
            # The text as it was, so that its type gives no second finding where text is right.
            return node
        return ScalarNode(value, node.place, node.plain)

    def _value(self, match: re.Match[str], node: ScalarNode, path: str) -> str:
        name, message = match[1], match[2]
        if name in self._secrets:
            text = f"${{{name}}} is a secret: its value would land in the spec"
            self._report(node, text, path, code="secret-value")
            return ""
        value = self._environ.get(name)
        if value is None or (message is not None and not value):
            state = "not set" if value is None else "empty"
            text = f"variable {name} is {state}" + (f": {message}" if message else "")
            self._report(node, text, path, f"export {name}=...")
            return ""
        if "${" in value:
            # What it became would be filled in again by whoever reads the rendered spec.
            self._report(node, f"variable {name} holds ${{ itself", path)
        return value

    def _report(
        self,
        node: ScalarNode,
        message: str,
        path: str,
        suggestion: str = "",
        *,
        code: str = "variable",
    ) -> None:
        self._findings.append(
            Finding(node.place, code, message, path=path, suggestion=suggestion, blocking=True)
        )
