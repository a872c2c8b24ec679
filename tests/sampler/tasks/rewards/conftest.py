"""Graders of maths; tests of other rewards have their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sampler.tasks.grading.graders import Graders
from tests.sampler.tasks.grading.plugin import reward


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    made = Graders([reward("math")], processes=2)
    yield made
    made.close()
