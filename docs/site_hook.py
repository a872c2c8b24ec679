"""Puts the pages of the repository's root into the site that `make docs` makes of this folder."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md"}
PAGES |= {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add them, with links as they are from this folder."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        text = text.replace("[examples](examples)", "`examples`")  # a folder, which no page shows
        files.append(File.generated(config, page, content=text))
    return files
