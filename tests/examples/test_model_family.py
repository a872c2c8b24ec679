"""A family that another package brings is trained, converted and refused like our own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from learner_jax.model import abstract_lora, abstract_params
from runspec.core.errors import UserError
from runspec.core.models import ModelConfig
from runspec.core.models import family as families
from runspec.core.models.family import MODELS_GROUP, Family, Row, family, load_config, parse_config
from runspec.core.models.parameters import (
    adapter_rows,
    parameters,
    trained_parameters,
)
from runspec.core.schema import Lora
from tests.examples.installed import add_package, installed_paths
from tests.learner_jax.families import saved
from tests.learner_jax.test_families import assert_parity

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of installed packages, this one among them; more may be added."""
    folder = tmp_path / "site"
    for path in installed_paths("model_family", folder):
        monkeypatch.syspath_prepend(path)
    families._offered.cache_clear()
    yield folder
    families._offered.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_is_what_transformers_computes(dtype):
    assert_parity("exaone4", dtype)


def test_the_module_is_as_its_table_says():
    config = load_config(saved("exaone4"))
    for tied in (False, True):
        config = replace(config, tie_word_embeddings=tied)
        assert abstract_params(config) == parameters(config)
        assert abstract_lora(config, Lora()) == trained_parameters(config, Lora())


def test_its_shape_is_read_without_jax(installed):
    # given a process that reads config and table, as linter, estimate, bridge and sampler do
    program = (
        "import sys; from pathlib import Path\n"
        "from bridge.weight_map import weight_map\n"
        "from runspec.core.models.family import load_config\n"
        "print(len(weight_map(load_config(Path(sys.argv[1])))), 'jax' in sys.modules)\n"
    )
    paths = os.pathsep.join(sys.path[:2])  # those of `installed`
    done = subprocess.run(
        [sys.executable, "-c", program, str(saved("exaone4"))],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    # then it knows the model's 14 parameters without the module
    assert done.stdout.split() == ["14", "False"]


@pytest.mark.parametrize(
    ("entry_points", "message"),
    [
        ("other = wrong_family:FAMILY", "'some' is not supported.*exaone4, llama, mistral.*models"),
        ("some = no_such_module:FAMILY", "No module named 'no_such_module'.*wrong-family needs"),
        ("some = exaone4_family:NOTHING", "no attribute 'NOTHING'.*wrong-family"),
        ("some = exaone4_family:TABLE", "a tuple is offered, where a Family is wanted.*wrong-fami"),
        ("exaone4 = exaone4_family:FAMILY", "several packages: exaone4-family, wrong-family"),
    ],
)
def test_a_wrong_entry_point_is_named_with_its_package(installed, entry_points, message):
    # given a package whose entry point is wrong
    add_package(installed, "wrong-family", f"[{MODELS_GROUP}]\n{entry_points}")
    # when a model of that family is read, then the package and the remedy are named
    model_type = "exaone4" if "exaone4 =" in entry_points else "some"
    with pytest.raises(UserError) as error:
        parse_config({"model_type": model_type}, place="config.json")
    assert re.search(message, f"{error.value} {error.value.remedy}", re.DOTALL)


def test_a_family_may_extend_the_config():
    # given a family whose config has a field of its own
    @dataclass(frozen=True)
    class WithField(ModelConfig):
        optional_norm: bool = True

    norm = Row("extra.weight", "model.extra.weight", "N", "N", mean=1.0, when="optional_norm")
    base = load_config(saved("exaone4"))
    extended = Family(lambda *_: base, (*family(base.model_type).table, norm), "none:None")
    # then rows may depend on it
    for there in (True, False):
        config = WithField(**vars(base), optional_norm=there)
        assert (norm in extended.rows(config)) == there


def test_a_target_that_the_family_does_not_have_is_named():
    with pytest.raises(UserError, match="exaone4 has no matrix qkv"):
        adapter_rows(load_config(saved("exaone4")), ["q", "qkv"])
