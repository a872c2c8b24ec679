"""What an exported page holds."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """Elements of a page, and the data that it holds."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][1].get("id") == "data" and data.strip():
            self.data = json.loads(data)


def report(path: Path) -> dict[str, Any]:
    """The data of the one run of a page: head, figures and the rest, without revisions."""
    [run] = Page(path.read_text()).data["runs"]
    return {name: value[1] if isinstance(value, list) else value for name, value in run.items()}
