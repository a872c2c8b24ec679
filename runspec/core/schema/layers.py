"""Reads the layers of a spec from files and from the command line, lowest first.

A file of `kind: Placement` is the site-specific part of a run, as a layer over a shared recipe. It
may set the fields that the schema marks as a site's (`SchemaField.site`): hardware, mesh, relays,
folders, secrets, budget, measured figures. It cannot change what is learned or how workers are
checked. It cannot add a pool, because a pool's lengths and types belong to the recipe.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.schema import VERSION, yaml_nodes
from runspec.core.schema.findings import SET_FILE, Comment, Finding, Place
from runspec.core.schema.schema_fields import block_in, close_match, named_item, schema_fields

MAX_FILES = 32
_SUFFIXES = (".yaml", ".yml")
ParsedFiles = dict[Path, tuple[str, yaml_nodes.Document]]
"""Cache of files, text and document: each is parsed once, even if several specs extend it."""
_OVERRIDE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class LayerReader:
    """Reads the layers of one spec and collects findings."""

    def __init__(self, findings: list[Finding], parsed: ParsedFiles) -> None:
        self._findings, self._parsed = findings, parsed
        self.texts: dict[str, str] = {}
        """Text of every file read, by the name that findings give it."""
        self.comments: dict[str, tuple[Comment, ...]] = {}
        """`# runspec:` comments by file."""
        self._read = 0

    def profile(self, path: Path, name: str) -> list[yaml_nodes.MapNode]:
        """Return the layers of a profile beside the spec (`profile_path`)."""
        folder = (path.parent / "profiles").absolute()
        found = (p.stem.rpartition(".") for p in folder.glob("*.yaml"))
        there = sorted({end for start, _, end in found if start in ("", path.stem)})
        if name not in there:
            close = close_match(name, there)
            raise UserError(
                f"no profile {name[:80]!r} in {folder}; there are: {', '.join(there) or 'none'}",
                place=str(path),
                remedy=f"did you mean {close}?" if close else "leave --profile out",
            )
        return self.file(profile_path(path, name))

    def override(self, text: str, number: int) -> list[yaml_nodes.MapNode]:
        """Return the layer of the `number`-th `--set path=value`; the value is YAML."""
        path, equals, value_text = text.partition("=")
        if not equals or not _OVERRIDE.fullmatch(path) or "\n" in text or "\r" in text:
            raise UserError(
                f"{text[:200]!r} is no path=value",
                place=SET_FILE,
                remedy="write --set algorithm.group_size=8, or --set samplers.NAME.dtype=float32",
            )
        # Empty lines and blanks replace the path, so that findings have the right line and column.
        before = "\n" * (number - 1)
        value = before + " " * (len(path) + 1) + value_text
        document = yaml_nodes.parse_yaml(value, SET_FILE, shown=before + text)
        self._findings += [replace(finding, path=path) for finding in document.findings]
        if document.findings:
            return []
        place = Place(SET_FILE, number, 1, text)
        node = document.root or yaml_nodes.ScalarNode(
            None, replace(place, column=len(path) + 2), plain=True
        )
        for key in reversed(path.split(".")):
            node = yaml_nodes.MapNode({key: yaml_nodes.Entry(place, node)}, place)
        assert isinstance(node, yaml_nodes.MapNode)
        return [node]

    def file(self, path: Path, stack: tuple[Path, ...] = ()) -> list[yaml_nodes.MapNode]:
        """Return the layers that a file extends, and then its own.

        Args:
            path: the file.
            stack: the files that extend it, each the next one.

        Raises:
            UserError: the file itself is missing, too large, or not UTF-8.
        """
        if path not in self._parsed:
            text = read_text(path)
            self._parsed[path] = text, yaml_nodes.parse_yaml(text, str(path))
        self._read += 1
        text, document = self._parsed[path]
        if str(path) not in self.texts:
            self._findings += document.findings
        self.texts[str(path)], self.comments[str(path)] = text, document.comments
        root = document.root
        if root is None and not document.findings:
            self._findings.append(yaml_nodes.broken(Place(str(path), 1, 1), "an empty file"))
        if root is None:
            return []
        if not isinstance(root, yaml_nodes.MapNode):
            message = "a spec is a map from keys to values"
            self._findings.append(yaml_nodes.broken(root.place, message))
            return []
        entries = dict(root.entries)
        extends = entries.pop("extends", None)
        listed = extends.value if extends is not None else None
        if listed is not None and not isinstance(listed, yaml_nodes.ListNode):
            self._report(listed.place, "a list of files was expected")
        layers: list[yaml_nodes.MapNode] = []
        for item in listed.items if isinstance(listed, yaml_nodes.ListNode) else ():
            layers += self._extended(path, item, (*stack, _real(path)))
        return [*layers, yaml_nodes.MapNode(entries, root.place)]

    def _extended(
        self, path: Path, item: yaml_nodes.Node, stack: tuple[Path, ...]
    ) -> list[yaml_nodes.MapNode]:
        """Return the layers of one entry of `extends`; none, with a finding, if it is wrong."""
        if not (isinstance(item, yaml_nodes.ScalarNode) and isinstance(item.value, str)):
            self._report(item.place, "a file name was expected")
            return []
        file = Path(os.path.normpath(path.parent / item.value))
        if _real(file) in stack:
            trouble = f"a cycle: {' -> '.join(p.name for p in (*stack, file))}"
        elif _real(file).suffix not in _SUFFIXES:
            # Findings quote lines of the file, so it must be meant as a layer.
            trouble = f"{item.value[:80]!r} is no .yaml file"
        elif self._read >= MAX_FILES:
            trouble = f"more than {MAX_FILES} files in all"
        else:
            try:
                return self.file(file, stack)
            except UserError as error:
                trouble = error.thing
        self._report(item.place, trouble)
        return []

    def _report(self, place: Place, message: str) -> None:
        finding = Finding(place, "extends", message, path="extends", blocking=True)
        self._findings.append(finding)


def profile_path(path: Path, name: str) -> Path:
    """Return the file of a spec's profile: `profiles/SPEC.NAME.yaml`, else `profiles/NAME.yaml`."""
    own = path.parent / "profiles" / f"{path.stem}.{name}.yaml"
    return own if own.exists() else own.with_name(f"{name}.yaml")


def _real(path: Path) -> Path:
    """Return the file behind symbolic links; `Path.resolve` would raise on a loop."""
    return Path(os.path.realpath(path))


def read_text(path: Path) -> str:
    """Return a file's text without its byte order mark.

    Raises:
        UserError: the file is missing, too large, or not UTF-8.
    """
    remedy = "name a YAML file that can be read"
    try:
        if not path.is_file():  # reading a pipe would block
            there = path.exists()
            what = f"{str(path)!r} is no regular file" if there else f"no file {str(path)!r}"
            if (path / "spec.yaml").is_file():
                remedy = f"name the file in it: {path / 'spec.yaml'}"
            raise UserError(what, place=str(path), remedy=remedy)
        return read_bounded(path, yaml_nodes.MAX_CHARACTERS).decode("utf-8-sig")
    except OSError as error:
        raise UserError(
            f"cannot read {str(path)!r}: {error.strerror}", place=str(path), remedy=remedy
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{str(path)!r} is not UTF-8: {error.reason} at byte {error.start}",
            place=str(path),
            remedy=remedy,
        ) from error


KIND = "Placement"
SCOPE = "placement-scope"
HEADER = ("version", "kind", "name")
"""Keys that describe the placement itself; `name` names the site."""


def is_placement(layer: yaml_nodes.MapNode) -> bool:
    """Return whether a file declares the kind Placement."""
    return yaml_nodes.text_at(layer, "kind") == KIND


def site_layers(
    layers: list[yaml_nodes.MapNode], recipe: yaml_nodes.MapNode | None, findings: list[Finding]
) -> list[yaml_nodes.MapNode]:
    """Return the layers of a placement's file, without its header and without forbidden fields.

    Args:
        layers: layers of the file and of those that it extends, its own last.
        recipe: the merged layers below it; None if a placement is checked by itself.
        findings: receives a finding for each forbidden field.
    """
    if not layers:
        return []
    own, wrong = layers[-1], None
    if not is_placement(own):
        hint = "a spec goes first on the command line, and what it builds on under `extends`"
        wrong = ("kind", SCOPE, f"a file of kind {KIND} was expected", hint)
    elif yaml_nodes.text_at(own, "version") != VERSION:
        wrong = ("version", "bad-value", f"version {VERSION} was expected", "")
    if wrong is not None:
        key, code, message, hint = wrong
        place = (yaml_nodes.value_at(own, key) or own).place
        findings.append(Finding(place, code, message, path=key, suggestion=hint, blocking=True))
        return []
    return [
        _site_part(
            replace(layer, entries={k: e for k, e in layer.entries.items() if k not in HEADER}),
            "",
            "",
            recipe,
            findings,
        )
        for layer in layers
    ]


def _site_part(
    node: yaml_nodes.MapNode,
    schema: str,
    shown: str,
    below: yaml_nodes.Node | None,
    findings: list[Finding],
) -> yaml_nodes.MapNode:
    """Return a map without the keys that a site may not set.

    Args:
        node: the map.
        schema: path in the schema, `<name>` for names, with a final dot.
        shown: the same path as people write it.
        below: node of the recipe at this path.
        findings: receives a finding for each key.
    """
    entries = {}
    for key, entry in node.entries.items():
        field, path = schema_fields().get(f"{schema}{key}"), f"{shown}{key}"
        kept: yaml_nodes.Node | None = None
        if field is None or field.site or (key == "name" and schema.endswith("<name>.")):
            kept = entry.value  # unknown keys are found when layers merge
        elif block_in(field.annotation) and isinstance(entry.value, yaml_nodes.MapNode):
            there = yaml_nodes.value_at(below, key)
            kept = _site_part(entry.value, f"{field.path}.", f"{path}.", there, findings)
        elif named_item(field.annotation) and (
            isinstance(entry.value, yaml_nodes.MapNode)
            or (isinstance(entry.value, yaml_nodes.ListNode) and entry.value.items)
        ):
            there = yaml_nodes.value_at(below, key)
            kept = _site_items(entry.value, f"{field.path}.<name>.", path, there, findings)
        else:
            _refuse(entry.key_place, path, findings)
        if kept is not None:
            entries[key] = replace(entry, value=kept)
    return replace(node, entries=entries)


def _site_items(
    node: yaml_nodes.Node,
    schema: str,
    shown: str,
    below: yaml_nodes.Node | None,
    findings: list[Finding],
) -> yaml_nodes.Node | None:
    """Return a list of named maps, or a map by name, without what a site may not set.

    None for a list without items, which would delete the recipe's. Arguments as for `_site_part`.
    """
    known = (
        None
        if not isinstance(below, yaml_nodes.ListNode)
        else {yaml_nodes.object_name(i): i for i in below.items}
    )
    kept: dict[str, yaml_nodes.Node] = {}
    for name, place, item in yaml_nodes.named_entries(node):
        path = f"{shown}.{name}" if name else shown
        if name and known is not None and name not in known:
            match = close_match(name, known)
            hint = f"did you mean {match}?" if match else f"there are: {', '.join(known)}"
            message = f"the recipe has no {name!r} there, and a placement adds none"
            findings.append(
                Finding(place, SCOPE, message, path=path, suggestion=hint, blocking=True)
            )
        elif name and isinstance(item, yaml_nodes.MapNode):
            there = None if known is None else known[name]
            kept[name] = _site_part(item, schema, f"{path}.", there, findings)
        else:
            _refuse(place, path, findings)
    if isinstance(node, yaml_nodes.MapNode):
        return replace(
            node, entries={n: replace(node.entries[n], value=item) for n, item in kept.items()}
        )
    assert isinstance(node, yaml_nodes.ListNode)
    return replace(node, items=tuple(kept.values())) if kept else None


def _refuse(place: Place, path: str, findings: list[Finding]) -> None:
    message = "a placement says where and with what; this is the recipe's to say"
    hint = f"say it in the spec; `runspec explain {path}`"
    # The field is removed in any case, so a suppression would have no effect.
    findings.append(Finding(place, SCOPE, message, path=path, suggestion=hint, blocking=True))
