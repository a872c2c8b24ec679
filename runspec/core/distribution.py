"""What this package is called where it is installed, which is not what is imported.

In the public registry `runspec` is a package of somebody else, and this one is not published. So
messages name the wheel's file, never a bare name that a stranger could register.
"""

from __future__ import annotations

NAME = "runspec-rl"
WHEEL = "runspec_rl-0.1.0-py3-none-any.whl"
"""What `make wheel` makes, below `dist/`."""


def install_command(extra: str) -> str:
    """Returns the command that installs an extra of this package from the wheel's folder."""
    return f'pip install "./{WHEEL}[{extra}]"'
