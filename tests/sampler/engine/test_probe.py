"""probe.json is read strictly, and one bad number is no agreement."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from runspec.core.errors import UserError
from sampler.engine.checks import probe_difference, read_probe

GOOD = {"sequences": [{"tokens": [5, 6, 7], "logprobs": [-1.0, -2.0]}]}


def write(directory, payload):
    text = payload if isinstance(payload, str) else json.dumps(payload)
    (directory / "probe.json").write_text(text)
    return directory


@pytest.mark.parametrize(
    "payload",
    [
        "not json",
        {},
        {"sequences": []},
        {"sequences": [{"tokens": [5], "logprobs": []}]},
        {"sequences": [{"tokens": [5, 6, 7], "logprobs": [-1.0]}]},
        {"sequences": [{"tokens": [5, 6], "logprobs": ["x"]}]},
        {"sequences": [{"tokens": [5, 6], "logprobs": [1e999]}]},
        {"sequences": [{"tokens": "56", "logprobs": None}]},
        {"sequences": [None]},
    ],
)
def test_a_malformed_probe_names_its_file(tmp_path, payload):
    with pytest.raises(UserError, match="cannot read the probe") as error:
        read_probe(write(tmp_path, payload))

    assert error.value.place == str(tmp_path / "probe.json")


def test_the_difference_is_a_mean_over_all_tokens(tmp_path):
    sequences = [*GOOD["sequences"], {"tokens": [1, 2], "logprobs": [-3.0]}]
    probe = read_probe(write(tmp_path, {"sequences": sequences}))

    difference = probe_difference(probe, [np.array([-1.5, -2.0]), np.array([-2.0])])

    assert difference == pytest.approx(0.5)


def test_a_log_prob_that_is_no_number_is_no_agreement(tmp_path):
    probe = read_probe(write(tmp_path, GOOD))

    assert math.isnan(probe_difference(probe, [np.array([math.nan, -2.0])]))
