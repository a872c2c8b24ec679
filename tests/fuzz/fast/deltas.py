"""Lane: what turns one version's weights into the next's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.fuzz.test_delta import make_setting, try_changed, try_made_up


def delta() -> Callable[[Random], bool]:
    """Changed deltas, and made-up segments beneath a sound header."""
    folder = tempfile.TemporaryDirectory()
    setting = make_setting(Path(folder.name))

    def case(rng: Random, folder: object = folder) -> bool:  # the folder lives as long as the case
        return (try_changed if rng.random() < 0.5 else try_made_up)(setting, rng)

    return case
