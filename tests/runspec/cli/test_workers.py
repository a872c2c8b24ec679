"""`runspec workers`, `ban` and `unban` against a real coordinator."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from runspec.cli import app
from runspec.cli.workers import worker_rows, worker_table
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.keys import SigningKey
from runspec.core.spec.resolved import dump_resolved
from runspec.local.endpoints import Endpoints, save_endpoints
from runspec.local.run_dir import hold
from tests.verify.coordinator.deployment import Site, tiny_spec
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.machine.events import BanLifted, KeyBanned, StepClosed


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    with site.origin():
        yield site


def listens(site: Site) -> None:
    save_endpoints(site.run_dir, Endpoints(site.url, site.weights, {}))


def command(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "250"})


def rows(site: Site) -> list[dict[str, object]]:
    result = command("workers", site.run_dir, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, object]] = json.loads(result.stdout)
    return found


def test_a_ban_and_an_appeal_from_the_run_directory(site: Site):
    with site.serving(), hold(site.run_dir):
        listens(site)
        key, worker = site.worker()
        stranger = SigningKey.generate().public_hex
        mine = key.public_hex

        # given a worker that is banned by the beginning of its key, and a key that never came
        banned = command("ban", site.run_dir, mine[:12], "--reason", "edited tokens")
        unseen = command("ban", site.run_dir, stranger, "--reason", "known from elsewhere")

        # then both are listed so, and the worker is told why
        assert (banned.exit_code, unseen.exit_code) == (0, 0), banned.output
        assert [(r["key"], r["pool"], r["standing"], r["reason"]) for r in rows(site)] == [
            (mine, "near", "banned", "edited tokens"),
            (stranger, None, "banned", "known from elsewhere"),
        ]
        with pytest.raises(UserError, match="403, this key is banned: edited tokens"):
            worker.lease(0.0)

        # when its appeal is granted, then it goes on in quarantine
        lifted = command("unban", site.run_dir, mine, "--reason", "a broken GPU")
        assert lifted.exit_code == 0 and "may work again" in lifted.output
        assert rows(site)[0]["standing"] == "quarantined"
        assert worker.lease(5.0) is not None
        assert "quarantined" in command("workers", site.run_dir).output
        live = rows(site)

    # and once the run is not alive, the ledger says the same, but who is alive
    assert rows(site) == [{**row, "alive": False} for row in live]

    # and the ledger keeps all of it
    with closing(Ledger(site.run_dir / "state.db")) as ledger:
        kinds = [type(e) for e in ledger.events()]
    assert (kinds.count(KeyBanned), kinds.count(BanLifted)) == (2, 1)


def test_a_ban_of_a_stopped_run_holds_when_it_goes_on(site: Site):
    # given a run that is stopped
    with site.serving(), hold(site.run_dir):
        key, _ = site.worker()
    site.root.save(site.run_dir / "keys" / "root.key")

    # when a key is banned, and another one's ban is lifted that has none
    banned = command("ban", site.run_dir, key.public_hex[:12], "--reason", "rubbish")
    refused = command("unban", site.run_dir, "0" * 64, "--reason", "x")
    role = command("ban", site.run_dir, site.validator.public_hex, "--reason", "x")

    # then it is listed, what cannot be is refused, and the run knows of the ban when it goes on
    assert banned.exit_code == 0, banned.output
    assert "409, this key is not banned" in str(refused.exception)
    assert "409, this key has a role" in str(role.exception)
    assert [(r["standing"], r["reason"]) for r in rows(site)] == [("banned", "rubbish")]
    with site.serving(), pytest.raises(UserError, match="403, this key is banned: rubbish"):
        site.client(key).lease(0.0)


def test_a_run_that_was_never_started_has_no_workers_and_a_damaged_ledger_is_named(tmp_path: Path):
    write_atomic(tmp_path / "spec.json", dump_resolved(tiny_spec()))
    assert "no worker has registered" in command("workers", tmp_path).output
    with closing(Ledger(tmp_path / "state.db")) as ledger:
        ledger.append([StepClosed(0.0, 3, (), "{}")])
    result = command("workers", tmp_path)
    assert isinstance(result.exception, UserError)
    assert "it cannot be replayed: steps close in order" in str(result.exception)


def test_what_cannot_be_done_is_said(site: Site):
    with site.serving(), hold(site.run_dir):
        listens(site)
        site.worker()
        for words, said in (
            (("ban", "abc"), "0 known keys begin with it"),
            (("ban", ""), "1 known keys begin with it"),
            (("unban", "0" * 64), "409, this key is not banned"),
            (("ban", site.validator.public_hex), "409, this key has a role"),
        ):
            result = command(words[0], site.run_dir, words[1], "--reason", "x")
            assert isinstance(result.exception, UserError)
            assert said in str(result.exception), words


def test_workers_are_listed_by_credit_and_reasons_cannot_move_the_cursor():
    worker = {
        "pool": "near",
        "standing": "quarantined",
        "reputation": 0.5,
        "prefill_share": 1.0,
        "accepted_submissions": 1,
        "rejected_submissions": 1,
        "withheld_leases": 0,
        "alive": True,
        "reason": "format: \x1b[2J",
    }
    few, many = ({**worker, "key": k * 64, "accepted_tokens": n} for k, n in (("a", 5), ("b", 7)))

    found = worker_rows({"workers": [few, many], "banned": {}})

    assert [row["credits"] for row in found] == [7, 5]
    console = Console(width=200, file=io.StringIO())
    console.print(worker_table(found))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "format: ?[2J" in shown and "\x1b" not in shown
