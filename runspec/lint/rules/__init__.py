"""The rules, one module a theme. Importing this package registers them all, in order of modules."""

from importlib import import_module
from pkgutil import iter_modules

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
