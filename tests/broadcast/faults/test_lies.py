"""Relays that answer wrongly, without end or not at all: an honest one beside them is enough."""

from __future__ import annotations

import logging
import shutil

import pytest

from runspec.core.errors import UserError
from runspec.core.latest import sign_latest

from .. import fake_relay as lies
from ..conftest import Run, contents, weights
from ..fake_relay import Answer, instead, only
from .conftest import within

QUICK = [
    *(lies.flipped, lies.truncated, lies.padded, lies.cut_off, lies.overflowing),
    *(lies.server_error, lies.huge_head, lies.garbage, lies.endless_body, lies.endless_chunks),
    *(lies.zipped, lies.odd_chunks, lies.endless_continue),
    *(lies.with_length(text) for text in ("-1", "9" * 30, "1e3", "")),
    instead(b""),
    instead(b"x" * 1000),
]
"""Lies that show at once, and those that only time shows."""
LASTING = [lies.silent, lies.endless_head, lies.endless_drip]


def named(answer: Answer) -> str:
    return answer.__name__.replace("<lambda>", "other bytes")


@pytest.mark.parametrize("lie", QUICK, ids=named)
def test_what_a_liar_spoils_an_honest_server_makes_good(
    run: Run, lie: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    # given a relay that lies about every chunk, named before an honest one
    run.publish(0, weights())
    liar, server = run.static(), run.static()
    liar.answer("/chunks/", lie)
    # when a client fetches
    with within(40), caplog.at_level(logging.WARNING):
        path = run.client(liar.url, server.url).fetch(0, manifest_digest=None, deadline_s=40)
    # then it has the truth, only the liar is blamed, and no chunk came twice from the honest one
    assert contents(path) == weights()
    blamed = [r.getMessage() for r in caplog.records if "/127.0.0.1" in r.getMessage()]
    if lie is not lies.overflowing:  # the truth came first: nothing to blame, nothing to believe
        assert any(line.startswith(liar.url) and ", chunk " in line for line in blamed)
    assert not any(line.startswith(server.url) for line in blamed)
    assert server.asked() <= len(run.chunks())


@pytest.mark.parametrize("lie", [lies.silent, lies.endless_drip], ids=named)
def test_who_never_ends_is_left_for_an_honest_server(run: Run, lie: Answer) -> None:
    run.publish(0, weights())
    liar, server = run.static(), run.static()
    liar.answer("/chunks/", lie)

    with within(9):  # one attempt at a chunk may take ten seconds
        path = run.client(liar.url, server.url).fetch(0, manifest_digest=None, deadline_s=9)

    assert contents(path) == weights()


def test_a_manifest_is_asked_of_another_where_one_is_silent(run: Run) -> None:
    # given a server that says nothing when a manifest is asked of it, named before a good one
    run.publish(0, weights())
    liar, server = run.static(), run.static()
    liar.answer("/manifest.json", lies.silent)
    client = run.client(liar.url, server.url)
    # when a client fetches, then the good one is asked long before all patience is gone
    path = client.fetch(0, manifest_digest=None, deadline_s=10)
    assert contents(path) == weights() and liar.asked("/versions/0/") == 1
    # and for the next version it is asked first
    run.publish(1, weights(seed=1))
    assert contents(client.fetch(1, manifest_digest=None, deadline_s=10)) == weights(seed=1)
    assert liar.asked("/versions/1/") == 0


@pytest.mark.parametrize("lie", [*QUICK, *LASTING], ids=named)
def test_with_a_liar_alone_the_fetch_ends_in_time_and_names_relay_and_chunk(
    run: Run, lie: Answer
) -> None:
    # given nobody but a relay that lies about every chunk
    run.publish(0, weights())
    liar = run.static()
    liar.answer("/chunks/", lie)
    if lie is lies.overflowing:  # with the truth first; that there is more does no harm, once
        liar.answer("/chunks/", only(1, lie, then=lies.flipped))
    client = run.client(liar.url)
    # when a client fetches, then it gives up at its deadline and says whom and what it waited for
    for deadline_s in (0.7, 3.0, 10.0):  # a busy machine may take longer to come to a chunk
        with within(deadline_s), pytest.raises(UserError) as failure:
            client.fetch(0, manifest_digest=None, deadline_s=deadline_s)
        if "chunk " in str(failure.value):
            break
    assert liar.url in str(failure.value)
    assert "model.safetensors at byte" in str(failure.value) or "config.json at" in str(
        failure.value
    )
    assert "chunk " in str(failure.value)
    assert not (run.folder / "cache" / "v0").exists()
    # and a restarted client goes on with what was right, once the relay is honest
    liar.answer("/chunks/", lies.honest)
    assert contents(run.client(liar.url).fetch(0, manifest_digest=None, deadline_s=10)) == weights()


ABOUT_ANY = [lies.flipped, lies.huge_head, lies.zipped, lies.silent, lies.endless_drip]
ABOUT_LATEST = [
    *(lies.truncated, lies.server_error, lies.garbage, lies.endless_body, lies.endless_head),
    instead(b"[" * 3000),
]


@pytest.mark.parametrize(
    ("document", "lie"),
    [
        *((name, lie) for name in ("manifest.json", "roles.json") for lie in ABOUT_ANY),
        *(("latest.json", lie) for lie in [*ABOUT_ANY, *ABOUT_LATEST]),
    ],
    ids=lambda value: value if isinstance(value, str) else named(value),
)
def test_documents_are_asked_for_elsewhere_or_given_up_in_time(
    run: Run, document: str, lie: Answer
) -> None:
    # given a relay that lies about a document
    digest = run.publish(0, weights())
    liar = run.static()
    liar.answer(document, lie)

    # when it is the only one, then the failure comes in time and names it
    with within(0.3), pytest.raises(UserError, match=liar.url):
        alone = run.client(liar.url, cache="alone")
        if document == "manifest.json":
            alone.fetch(0, manifest_digest=None, deadline_s=0.3)
        else:
            alone.latest(None, 0.3)
    assert not (run.folder / "alone" / "v0").exists()

    # and when an honest one is beside it, then it hides nothing
    with within(1):
        both = run.client(liar.url, run.static().url, cache="both")
        latest = both.latest(None, 10)
    assert latest is not None and latest.manifest_digest == digest


def test_an_old_version_does_not_pass_for_the_newest(run: Run) -> None:
    run.publish(0, weights())
    old = run.folder / "old"
    shutil.copytree(run.store, old)
    run.publish(1, weights(seed=1))
    seen = run.client(run.origin().url).latest(None, 10)
    assert seen is not None and seen.version == 1
    stale = run.static(old)

    # The same cache directory: a restarted client has not forgotten either.
    with pytest.raises(UserError, match="offers version 0 as the newest, 1 was seen"):
        run.client(stale.url).latest(None, 0.7)

    # And beside an honest server the stale one hides nothing.
    both = run.client(stale.url, run.static().url, cache="both").latest(0, 10)
    assert both is not None and both.version == 1


def test_a_valid_old_version_under_a_new_number_is_refused(run: Run) -> None:
    # given a relay that shows version 0's manifest, rightly signed, where version 1's should be
    old = run.publish(0, weights())
    run.publish(1, weights(seed=1))
    liar = run.static()
    truth = (run.store / "demo/versions/0/manifest.json").read_bytes()
    liar.answer("versions/1/manifest.json", instead(truth))
    client = run.client(liar.url)
    # when a client asks for version 1, named by its number or by latest.json, then it is refused
    with pytest.raises(UserError, match="is of version 0"):
        client.fetch(1, manifest_digest=None, deadline_s=0.7)
    latest = client.latest(None, 10)
    assert latest is not None and latest.version == 1
    with pytest.raises(UserError, match=f"its digest is {old[:16]}, not"):
        client.fetch(1, manifest_digest=latest.manifest_digest, deadline_s=0.7)
    # and beside an honest relay it is fetched
    honest = run.client(liar.url, run.static().url)
    path = honest.fetch(1, manifest_digest=latest.manifest_digest, deadline_s=10)
    assert contents(path) == weights(seed=1)


def test_a_version_number_cannot_change_its_meaning(run: Run) -> None:
    run.publish(0, weights())
    client = run.client(run.static().url)
    assert client.latest(None, 10) is not None
    other = sign_latest("demo", 0, "1" * 64, run.key)
    (run.store / "demo" / "latest.json").write_bytes(other)

    with pytest.raises(UserError, match="names another manifest for version 0"):
        client.latest(None, 0.7)


def test_no_server_at_all_is_named(run: Run) -> None:
    gone = run.origin()
    gone.stop()

    with within(0.3), pytest.raises(UserError, match=gone.url):
        run.client(gone.url).fetch(0, manifest_digest=None, deadline_s=1)
