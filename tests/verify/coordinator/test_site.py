"""What volunteers are told and given: addresses, the data's files by digest, and nothing else."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest

from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, sign_document
from tests.verify.coordinator.deployment import RUN, Site, tiny_spec
from tests.verify.coordinator.over_http import post
from verify.formats.joining import SiteFile, open_site
from verify.formats.lease import lease_digest

ROWS = b'{"problem_id": "p"}\n' * 1000


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A run whose one source is a file."""
    (tmp_path / "rows.parquet").write_bytes(ROWS)
    (tmp_path / "secret.txt").write_text("not of the data")
    spec = tiny_spec()
    source = spec.data.sources[0].model_copy(update={"uri": str(tmp_path / "rows.parquet")})
    data = spec.data.model_copy(update={"sources": [source]})
    site = Site(tmp_path, spec.model_copy(update={"data": data}))
    with site.origin(), site.serving():
        yield site


def test_a_volunteer_gets_the_datas_files_and_they_are_checked(site: Site, tmp_path: Path):
    _, client = site.worker()

    (file,) = client.site().files
    client.fetch_data(file, tmp_path / "copy" / "rows.parquet")

    assert (tmp_path / "copy" / "rows.parquet").read_bytes() == ROWS
    assert (file.bytes, file.digest) == (len(ROWS), digest_bytes(ROWS))
    assert client.site().weights == [site.weights]


def test_a_packed_copy_beside_a_file_of_the_data_is_not_served_in_its_place(
    site: Site, tmp_path: Path
):
    (tmp_path / "rows.parquet.gz").write_bytes(gzip.compress(ROWS))
    _, client = site.worker()

    (file,) = client.site().files
    client.fetch_data(file, tmp_path / "copy" / "rows.parquet")

    assert (tmp_path / "copy" / "rows.parquet").read_bytes() == ROWS


def test_a_file_that_changed_under_the_coordinator_is_refused_and_leaves_nothing(
    site: Site, tmp_path: Path
):
    _, client = site.worker()
    (file,) = client.site().files
    (tmp_path / "rows.parquet").write_bytes(ROWS[::-1])

    with pytest.raises(UserError, match="other bytes than those of"):
        client.fetch_data(file, tmp_path / "copy" / "rows.parquet")
    (tmp_path / "rows.parquet").unlink()
    with pytest.raises(UserError, match="404"):
        client.fetch_data(file, tmp_path / "copy" / "rows.parquet")

    assert list((tmp_path / "copy").iterdir()) == []


@pytest.mark.parametrize("name", ["0" * 64, "../secret.txt", "secret.txt", "..%2Fsecret.txt"])
def test_nothing_but_the_listed_files_is_served(site: Site, name: str):
    answer = httpx.get(f"{site.url}/v1/data/{name}")

    assert answer.status_code == 404
    assert b"not of the data" not in answer.content


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weights": "http://x"}, "valid array"),
        ({"files": {}}, "valid array"),
        ({"weights": {"x": 1}}, "valid array"),
        *(
            ({"files": [asdict(SiteFile("s", path, 1, "0" * 64))]}, "path")
            for path in ("../x", "/etc/passwd", "a/../../x", "a\\..\\x")
        ),
    ],
)
def test_a_document_of_no_lists_or_whose_paths_lead_elsewhere_is_not_believed(changed, said: str):
    key = SigningKey.generate()
    fields = {"run": RUN, "weights": ["http://x"], "files": [], "data": "", **changed}
    document = sign_document("site", fields, key)
    with pytest.raises(BadSignature, match=said):
        open_site(document, coordinators=frozenset({key.public_hex}), run=RUN)


def test_nobody_gives_anothers_lease_back(site: Site):
    site.publish(0)
    _, holder = site.worker()
    other = SigningKey.generate()
    site.client(other).register("near", {})
    lease = holder.lease(10.0)
    assert lease is not None
    body = canonical_json({"leases": [lease_digest(lease)]})

    assert post(site, other, "/v1/release", body).status_code == 200
    mine = holder.lease(10.0)
    assert mine is not None and mine != lease  # it is open still, so the next is another one
