"""Parses YAML text to nodes with their places, by YAML 1.2's core schema.

PyYAML's parser gives the events. Its YAML 1.1 resolver is not used: it reads `1e-6` as text, `on`
as true and `010` as eight, and drops the first of two equal keys. Documents are untrusted: their
size, depth and expansion by aliases are limited, and tags are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from runspec.core.schema.findings import MARKER, Comment, Finding, Place, Span, find_comments

MAX_CHARACTERS = 256 * 1024
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Nodes of a document after its aliases are expanded."""
MAX_NUMBER = 64
"""Most characters of a number."""
MAX_INTEGER = 2**63 - 1
"""Largest integer, so that a product of several counts fits a float."""

ScalarValue = str | int | float | bool | None


@dataclass(frozen=True)
class ScalarNode:
    value: ScalarValue
    place: Place
    plain: bool
    """Whether it is written without quotes, so that its text determines its type."""
    size: int = 1
    height: int = 0


@dataclass(frozen=True)
class ListNode:
    items: tuple[Node, ...]
    place: Place
    size: int = 1
    height: int = 1


@dataclass(frozen=True)
class Entry:
    """Value of a map, and the place of its key."""

    key_place: Place
    value: Node


@dataclass(frozen=True)
class MapNode:
    entries: dict[str, Entry]
    place: Place
    size: int = 1
    """Number of nodes in it, aliases expanded."""
    height: int = 1
    """Number of levels below it."""
    deleted: dict[str, Place] = field(default_factory=dict)
    """Places of the nulls that deleted keys when layers were merged, by key."""


Node = ScalarNode | ListNode | MapNode


def value_at(node: Node | None, key: str) -> Node | None:
    """Return the value of a map's key; None if `node` is not a map or lacks the key."""
    entry = node.entries.get(key) if isinstance(node, MapNode) else None
    return entry.value if entry else None


def text_at(node: Node | None, key: str) -> str:
    """Return the text of a map's key; empty if it has none."""
    value = value_at(node, key)
    return value.value if isinstance(value, ScalarNode) and isinstance(value.value, str) else ""


def object_name(node: Node) -> str:
    """Return the `name` of a named object; empty if it has no name that is text."""
    return text_at(node, "name")


def named_entries(node: Node) -> list[tuple[str, Place, Node]]:
    """Return name, place and node of each item of a list of named maps, or of a map by name.

    The name is empty for an item that has none.
    """
    if isinstance(node, MapNode):
        return [(name, entry.key_place, entry.value) for name, entry in node.entries.items()]
    items = node.items if isinstance(node, ListNode) else ()
    return [(object_name(item), item.place, item) for item in items]


@dataclass(frozen=True)
class Document:
    """Root node of a file, None if the file is empty or broken, and its findings."""

    root: Node | None
    findings: list[Finding]
    comments: tuple[Comment, ...] = ()
    """Comments that begin with `# runspec:`."""


class _Broken(Exception):
    """Error: the text cannot be parsed any further. Its arguments are place and message."""


_HINTS = {
    r"'\t' that cannot start any token": "indent with blanks: YAML takes no tabs",
    "<block mapping start>": "indent the keys of a map alike; one of them stands further in or out",
    "<document start>": "name a spec, which is one YAML document; this looks like a file of rows",
    "mapping values are not allowed here": "put text with a colon in quotes, or indent it less",
}
"""Suggestions by words of PyYAML's message."""


def broken(place: Place, message: str) -> Finding:
    """Return a finding of a file that cannot be parsed."""
    hint = next((hint for words, hint in _HINTS.items() if words in message), "")
    return Finding(place, "yaml", message, suggestion=hint, blocking=True)


_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {w: w.lower() == "true" for w in ("true", "True", "TRUE", "false", "False", "FALSE")}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_ANCHOR = re.compile(r"&[^ \t]+[ \t]+")
_QUOTED = re.compile(r"""(?<![^\s\[{,:])(?:"(?:\\.|[^"\\])*"|'(?:''|[^'])*')""", re.DOTALL)
_NAN = {".nan", ".NaN", ".NAN"}


def resolve_scalar(text: str) -> ScalarValue:
    """Return the value of a plain scalar by the core schema (YAML 1.2.2, section 10.3.2).

    Raises:
        ValueError: a number above MAX_NUMBER or MAX_INTEGER.
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if text in _NAN:
        return float("nan")
    if _INFINITY.fullmatch(text):
        return float("-inf" if text.startswith("-") else "inf")
    for pattern, convert in (
        (_INT, int),
        (_OCTAL, lambda digits: int(digits[2:], 8)),
        (_HEX, lambda digits: int(digits[2:], 16)),
        (_FLOAT, float),
    ):
        if pattern.fullmatch(text):
            if len(text) > MAX_NUMBER:
                raise ValueError(f"a number of {len(text)} characters")
            value = convert(text)
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                raise ValueError(f"a whole number beyond {MAX_INTEGER}")
            return value
    return text


def parse_yaml(text: str, file: str, *, shown: str | None = None) -> Document:
    """Parse the one document of `text`; findings quote the lines of `shown` if given.

    Broken YAML, tags, several documents, keys that are not words, and documents above a limit give
    no root. A duplicate key is a finding beside the root.
    """
    composer = _Composer(text, file, shown or text)
    try:
        return Document(composer.document(), composer.findings, composer.comments())
    except _Broken as problem:
        finding = broken(*problem.args)
    except yaml.MarkedYAMLError as error:
        message = " ".join(part for part in (error.context, error.problem) if part)
        place = composer.place(error.problem_mark or error.context_mark)
        end = error.problem_mark
        opened = None if end is None else _opened(text, error, end)
        if end is not None and opened is not None:
            before = "the end" if end.index >= len(text) else f"line {place.line}"
            message = f"the {text[opened.index]} that opens here is not closed before {before}"
            place = composer.place(opened)
        finding = broken(place, f"broken YAML: {message}")
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The reader's, for characters that YAML forbids, and the scanner's, for escapes beyond
        # Unicode: neither says where.
        message = str(error).splitlines()[0]
        finding = broken(Place(file, 1, 1), f"broken YAML: {message}")
    return Document(None, [*composer.findings, finding])


def _opened(text: str, error: yaml.MarkedYAMLError, end: yaml.Mark) -> yaml.Mark | None:
    """Return the start of a bracket or quote that is not closed; None if there is none.

    A quote that is not closed ends at the next quote, so the parser fails after that.
    """
    start = error.context_mark
    if start is not None and str(error.context).endswith(
        ("flow mapping", "flow sequence", "quoted scalar")
    ):
        return start if start.line < end.line or end.index >= len(text) else None
    line_start = end.index - end.column
    for quoted in _QUOTED.finditer(text, 0, end.index):
        if quoted.start() < line_start <= quoted.end():
            before = text[: quoted.start()]
            column = quoted.start() - (before.rfind("\n") + 1)
            return yaml.Mark(end.name, quoted.start(), before.count("\n"), column, None, 0)
    return None


class _Composer:
    """Builds nodes from the parser's events, and checks every limit."""

    def __init__(self, text: str, file: str, shown: str) -> None:
        self.findings: list[Finding] = []
        self._file = file
        self._text = text
        # The same breaks as PyYAML's reader counts.
        self._lines = re.split("\r\n|[\r\n\x85\u2028\u2029]", shown)
        self._events: Iterator[Any] = iter(())
        self._anchors: dict[str, Node] = {}
        self._end = 0
        """Last line of the newest node."""
        self._hashes: list[Span] = []
        """Spans of scalars with a `#` inside."""
        self._extents: dict[int, int] = {}
        """Last line of a value by its first line, if it spans lines."""

    def place(self, mark: Any, end: Any = None) -> Place:
        if mark is None:
            return Place(self._file, 1, 1)
        source = self._lines[mark.line] if mark.line < len(self._lines) else ""
        width = end.column - mark.column if end is not None and end.line == mark.line else 0
        return Place(self._file, mark.line + 1, mark.column + 1, source, width)

    def comments(self) -> tuple[Comment, ...]:
        """Return the file's `# runspec:` comments, after the document is read."""
        if not MARKER.search(self._text):
            return ()
        return find_comments(self._lines, self._file, self._hashes, self._extents)

    def document(self) -> Node | None:
        if len(self._text) > MAX_CHARACTERS:
            raise _Broken(Place(self._file, 1, 1), f"longer than {MAX_CHARACTERS} characters")
        self._events = yaml.parse(self._text, Loader=yaml.SafeLoader)
        next(self._events)  # the stream's start
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return None
        root = self._node(next(self._events), depth=0)
        next(self._events)  # the document's end
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            raise _Broken(self.place(event.start_mark), "a second document")
        return root

    def _node(self, event: Any, depth: int) -> Node:
        place = self.place(event.start_mark)
        self._end = place.line
        if isinstance(event, yaml.AliasEvent):
            anchor = str(event.anchor)
            node = self._anchors.get(anchor)
            if node is None:
                raise _Broken(place, f"alias *{anchor[:80]} of nothing before it")
        elif event.tag is not None:
            raise _Broken(place, f"tag {event.tag[:80]!r}: a spec has no use for tags")
        elif depth > MAX_DEPTH:
            raise _Broken(place, f"nested deeper than {MAX_DEPTH}")
        elif isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self._list(event, place, depth)
        else:
            node = self._map(event, place, depth)
        if depth + node.height > MAX_DEPTH:  # by an alias
            raise _Broken(place, f"nested deeper than {MAX_DEPTH}")
        if not isinstance(event, yaml.AliasEvent) and event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _scalar(self, event: Any) -> ScalarNode:
        place = self.place(event.start_mark, event.end_mark)
        if anchor := _ANCHOR.match(place.written):
            # The place is that of the value, without the anchor.
            at, width = place.column + anchor.end(), place.width - anchor.end()
            place = replace(place, column=at, width=width)
        plain = event.style is None
        self._reached(event, place)
        try:
            return ScalarNode(resolve_scalar(event.value) if plain else event.value, place, plain)
        except ValueError as error:
            raise _Broken(place, str(error)) from error

    def _reached(self, event: Any, place: Place) -> None:
        """Check a scalar's text, and record where it ends, and its span if it has a `#`."""
        # Escapes can name half of a surrogate pair, or the null character.
        if any("\ud800" <= c <= "\udfff" or c == "\0" for c in event.value):
            raise _Broken(place, "a character that is no text")
        start, end = event.start_mark, event.end_mark
        block = event.style in ("|", ">")
        # A block scalar ends where the next line begins.
        self._end = end.line if block and not end.column else end.line + 1
        if "#" in event.value:
            # A comment may stand behind the `|` of a block scalar.
            first = (start.line + 1, 0) if block else (start.line, start.column)
            self._hashes.append((first, (end.line, end.column)))

    def _begun(self, line: int) -> None:
        """Record that the value that begins in `line` ends with the newest node."""
        if self._end > line:
            self._extents[line] = max(self._end, self._extents.get(line, 0))

    def _list(self, start: Any, place: Place, depth: int) -> ListNode:
        items: list[Node] = []
        size = 1
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1))
            size = self._grown(size, items[-1])
            self._begun(event.start_mark.line + 1)
        self._closed(start, event)
        return ListNode(tuple(items), place, size, 1 + max((i.height for i in items), default=0))

    def _map(self, start: Any, place: Place, depth: int) -> MapNode:
        entries: dict[str, Entry] = {}
        size, height = 1, 0
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key_place = self.place(event.start_mark, event.end_mark)
            if not isinstance(event, yaml.ScalarEvent) or event.tag is not None or not event.value:
                raise _Broken(key_place, "a key must be a word")
            self._reached(event, key_place)
            key = event.value
            value = self._node(next(self._events), depth + 1)
            self._begun(key_place.line)
            size = self._grown(size, value)
            height = max(height, value.height)
            if key in entries:
                line = entries[key].key_place.line
                message = f"key {key[:80]!r} twice, first in line {line}"
                self.findings.append(Finding(key_place, "duplicate-key", message))
            else:
                entries[key] = Entry(key_place, value)
        self._closed(start, event)
        return MapNode(entries, place, size, 1 + height)

    def _closed(self, start: Any, end: Any) -> None:
        """Record where a list or map in brackets ends; one without ends with its newest node."""
        if start.flow_style:
            self._end = end.end_mark.line + 1

    def _grown(self, size: int, child: Node) -> int:
        if size + child.size > MAX_NODES:
            raise _Broken(child.place, f"more than {MAX_NODES} nodes, aliases expanded")
        return size + child.size
