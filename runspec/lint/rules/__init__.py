"""Rules of the linter, one module a theme; importing the package registers all, by module name."""

from importlib import import_module
from pkgutil import iter_modules

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
