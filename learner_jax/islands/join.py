"""Connects a learner's loop with the other islands, or with nobody in a run with one learner."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bridge.codecs import codec
from bridge.flat import FlatLayout
from learner_jax.islands.connection import Connection
from learner_jax.islands.exchange import Exchange
from learner_jax.islands.island import Island
from learner_jax.islands.joining import Joining
from learner_jax.islands.member import Alone, Member
from learner_jax.islands.share_fetcher import ShareFetcher
from learner_jax.islands.share_store import ShareStore
from learner_jax.learner_run import LearnerRun
from learner_jax.step import Programs
from runspec.core.files import read_bounded
from runspec.core.keys import SigningKey
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from verify.island_client import IslandClient


@contextmanager
def join(
    run: LearnerRun, programs: Programs, corpus: str | None, stop: threading.Event
) -> Iterator[Member]:
    """Give the loop its island, with a connection to the others for the block's time.

    Args:
        run: as this island sees it.
        programs: of the island.
        corpus: digest of the documents; None for a run that trains on rollouts.
        stop: set when this process is told to end.

    Raises:
        UserError: the key or the store cannot be read.
    """
    link, islands, peers = run.link, run.spec.learner.islands, run.peers
    if link is None:
        yield Alone()
        return
    assert islands is not None, "a link is of a run with islands"
    if not peers.first:
        yield Island(run, programs, islands, None)
        return
    name, root = run.spec.name, run.root_public_key()
    key = SigningKey.load(link.key)
    roles = read_bounded(run.folder / "keys" / "roles.json", MAX_ROLES_BYTES)
    connection = Connection(
        island=link.name,
        url=link.share_url,
        size=FlatLayout(run.config).size,
        client=IslandClient(link.coordinator, name, key, root_public_key=root),
        store=ShareStore(link.share_store, run=name, key=key, roles=roles),
        fetcher=ShareFetcher(run=name, root_public_key=root, folder=run.folder / "shares"),
        stop=stop,
        log=run.log,
    )
    with Exchange(
        connection,
        Joining(connection, run.spec.checkpoints.every),
        run=name,
        corpus=corpus or "",
        codec=codec(islands.codec.kind),
        min_cosine=islands.min_cosine,
        silence_s=islands.silence,
        optimizer=islands.outer,
    ) as exchange:
        yield Island(run, programs, islands, exchange)
