"""A validator that has other data than the coordinator would reject honest rollouts: it ends."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from tests.verify.coordinator.deployment import RUN, Site, tiny_spec
from verify import validator


def test_a_validator_with_other_data_ends_at_its_start_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a coordinator that has looked at its rows
    rows = tmp_path / "rows.parquet"
    rows.write_bytes(b"its rows")
    spec = tiny_spec()
    source = spec.data.sources[0].model_copy(update={"uri": str(rows)})
    data = spec.data.model_copy(update={"sources": [source]})
    site = Site(tmp_path, spec.model_copy(update={"data": data}))
    monkeypatch.setattr(validator, "require_graders", lambda spec: None)
    with site.origin(), site.serving():
        site.worker()[1].site()

        # When a validator starts that has others
        rows.write_bytes(b"other rows")
        key = tmp_path / "validator.key"
        site.validator.save(key)
        with pytest.raises(UserError, match="the coordinator are made from other data") as caught:
            validator.run(
                run=RUN,
                coordinator=site.url,
                weights=[site.weights],
                public_key=site.root.public_hex,
                key_file=key,
                directory=tmp_path / "validator",
                stop=threading.Event(),
                log=logging.getLogger("test"),
            )

    # Then it says what to do before it has claimed anything
    assert "give both the same files" in caught.value.remedy
