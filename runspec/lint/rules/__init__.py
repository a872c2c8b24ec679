"""Rules of the linter by theme: rows in .toml, functions in .py. Importing it registers all."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from runspec.lint.table import read_rows

for path in sorted(Path(__file__).parent.glob("*.toml")):
    read_rows(path)
for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
