"""The batch manifest: what it says comes back, from before it anchored the ledger too."""

from dataclasses import asdict

import pytest

from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, sign_document
from verify.formats.batch import KIND, BatchGroup, BatchManifest, open_batch, sign_batch

KEY = SigningKey.generate()
GROUP = BatchGroup("ab" * 32, "cd" * 32, 1, 3, 2)


def opened(data: bytes) -> BatchManifest:
    return open_batch(data, coordinators=frozenset({KEY.public_hex}), run="r", step=3)


def test_a_manifest_comes_back_with_its_anchor():
    manifest = BatchManifest("r", 3, [GROUP], True, {"opened": 1.0}, 12, "ef" * 32)

    assert opened(sign_batch(manifest, KEY)) == manifest


def test_a_manifest_from_before_the_anchor_is_read_and_keeps_its_payload():
    fields = {"run": "r", "step": 3, "groups": [asdict(GROUP)], "complete": True, "stats": {}}

    manifest = opened(sign_document(KIND, fields, KEY))

    assert (manifest.ledger_rows, manifest.ledger_chain) == (None, None)
    assert manifest.payload() == fields


@pytest.mark.parametrize(
    "changed",
    [
        {"groups": {}},
        {"groups": [{**asdict(GROUP), "group": [1]}]},
        {"groups": [{**asdict(GROUP), "version": -1}]},
        {"groups": [{**asdict(GROUP), "step": True}]},
        {"complete": "yes"},
        {"stats": []},
        {"step": 3.0},
        {"run": ["r"] * 9999},
    ],
)
def test_fields_of_another_form_are_refused(changed: dict[str, object]):
    fields = {"run": "r", "step": 3, "groups": [], "complete": True, "stats": {}}

    with pytest.raises(BadSignature, match="batch: ") as refused:
        opened(sign_document(KIND, {**fields, **changed}, KEY))

    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "anchor",
    [
        {"ledger_rows": 3},
        {"ledger_chain": "ef" * 32},
        {"ledger_rows": None},
        {"ledger_rows": None, "ledger_chain": None},
        {"ledger_rows": 0, "ledger_chain": "ef" * 32},
        {"ledger_rows": True, "ledger_chain": "ef" * 32},
        {"ledger_rows": 3, "ledger_chain": "EF" * 32},
    ],
)
def test_an_anchor_that_is_none_is_refused(anchor: dict[str, object]):
    fields = {"run": "r", "step": 3, "groups": [], "complete": True, "stats": {}}

    with pytest.raises(BadSignature, match="batch: "):
        opened(sign_document(KIND, {**fields, **anchor}, KEY))
