"""One run that changes as it goes, is paused, taken back, and resumed elsewhere to its end.

Shows: a model whose family another package brings is sampled, judged and trained; a rolling change
renews the roles that it concerns under a learner that goes on, and versions become deltas; a pause;
a rollback that keeps the steps below its version and publishes that version anew under another
root; a resume with restart changes (another mesh, one more validator and relay, more steps),
without a complaint in any log; every command on a finished run.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import jax
import pytest

from broadcast.store import newest_version
from learner_jax.leaves import save_weights
from learner_jax.model import init_params
from runspec.core.models import family
from runspec.core.models.family import parse_config
from runspec.core.run_files import STATE_FILE
from runspec.core.schema.load import SpecFiles, load_layers, load_resolved
from sampler.tasks.traces import build_warm_start_data
from tests.examples.installed import installed_paths
from tests.harness import TARGET_SHORT, LiveRun, runspec, standing_still
from tests.waiting import HANG_S
from verify.coordinator.ledger import Ledger
from verify.coordinator.machine.events import RolledBack

pytestmark = pytest.mark.nightly

STEPS = 41
"""So many that the run is far from its end when it is paused."""
# At so small a rate few float32 bits change.
START = {
    "steps": STEPS - 1,
    "checkpoints.every": 2,
    "checkpoints.keep": 99,
    "optimizer.lr": 1e-10,
    "warm_start": "null",
    "model.shape": "null",
}
ROLLING = {
    "verify.lease_timeout": "25s",
    "verify.prefill_share": 0.5,
    "broadcast.format": "delta",
}
UNPUBLISHED = "latest.json: not there (404)"
OTHER_PLACES = {
    "verify.validators": 2,
    "broadcast.relays.second.upstream": "[origin]",
    "learner.mesh.fsdp": 1,
    "learner.hardware.count": 1,
    "checkpoints.every": 3,
    "steps": STEPS,
}
"""Restart changes of many kinds: another fleet, other ways to it, another mesh, more steps."""


EXAONE4 = {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "hidden_act": "silu",
    "vocab_size": 192,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "layer_types": ["full_attention", "full_attention"],
    "dtype": "float32",
}


@contextmanager
def installed(directory: Path) -> Iterator[None]:
    """The package, for this process and for all that it starts inside the block.

    Args:
        directory: gets the package's metadata; does not exist yet.
    """
    with pytest.MonkeyPatch.context() as patch:
        paths = installed_paths("model_family", directory)
        for path in paths:
            patch.syspath_prepend(path)
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        family._offered.cache_clear()
        yield
    family._offered.cache_clear()


def write_model(directory: Path) -> None:
    """Random weights, and the tokenizer that the laptop profile makes."""
    directory.mkdir()
    data = build_warm_start_data(load_layers(SpecFiles(TARGET_SHORT, "laptop")).require())
    data.write_tokenizer(directory)
    ids = {"eos_token_id": data.eos_token_id, "pad_token_id": data.pad_token_id}
    (directory / "config.json").write_text(json.dumps(EXAONE4 | ids))
    config = parse_config(EXAONE4, place="config.json")
    save_weights(init_params(config, jax.random.key(0)), config, directory)


@pytest.fixture(scope="module")
def finished(runs_dir, tmp_path_factory):
    """The run, and its rows of metrics and its root key when it was paused."""
    folder = tmp_path_factory.mktemp("family")
    start = START | {"model.hf": folder / "model"}
    with installed(folder / "site"):
        write_model(folder / "model")
        with LiveRun(runs_dir, "changing", start) as run:
            yield (run, *changed(run, start))


def changed(run, start):
    """Takes the run to its end; returns its rows of metrics and its root key when it was paused."""
    # given a run under way, whose learner stands still, so that most steps are left
    run.wait_for_step(1)
    with standing_still(run.pids()["learner"]):
        before = run.status()["roles"]
        # when a rolling change is applied to it
        run.overrides = {**start, **ROLLING}
        done = runspec("apply", *run.words)
        # then all but learner and servers are others
        assert done.returncode == 0, done.stderr + run.output()
        assert "taken over (serial 2)" in done.stdout
        after = run.status()["roles"]
    renewed = {name for name in after if after[name]["pid"] != before[name]["pid"]}
    assert renewed == {"coordinator", "publisher", "validator-0", "volunteers-0"}
    assert load_resolved(run.dir).verify.lease_timeout == 25.0
    # and the learner goes on, with versions that come as deltas
    log = run.dir / "logs" / "volunteers-0.log"
    run.wait_until(lambda: "from held version" in log.read_text(), "a delta")
    run.wait_for_step(4)

    # when it is paused, once and again
    paused = runspec("pause", run.dir)
    assert paused.returncode == 0, paused.stderr
    assert run.process.wait(HANG_S) == 0
    assert run.status()["state"] == "paused"
    assert runspec("pause", run.dir).returncode == 0, "a paused run is paused"
    trained, root = run.metrics(), (run.dir / "keys" / "root.key").read_bytes()
    # and taken back to version 2
    back = runspec("rollback", run.dir, "--to", "2", "--yes")
    assert back.returncode == 0, back.stderr
    assert run.metrics() == trained[:2]
    for log in logs_of(run):
        log.unlink()  # so that only what comes is looked at
    # and applied with other places and a little more to do
    run.overrides |= OTHER_PLACES
    plan = json.loads(runspec("plan", *run.words, "--json").stdout)
    assert (plan["serial"], plan["change_class"]) == (3, "restart")
    run.apply()
    # then it reaches its end
    run.finish()
    return trained, root


def test_every_step_is_there_once_those_below_the_version_as_they_were(finished):
    run, trained, _ = finished
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert rows[:2] == trained[:2]
    assert all(row["lag_max"] <= 2 for row in rows)
    assert json.loads((run.dir / "summary.json").read_text())["rollouts_rejected"] == 0


def test_a_family_from_a_package_is_sampled_judged_and_trained(finished):
    # then vLLM, the validator's prefill and the learner compute the same log-probs
    rows = finished[0].metrics()
    differences = [row["logprob_diff"] for row in rows]  # None where no rollout was prefilled
    assert max(each for each in differences if each is not None) < 1e-4
    # and every step moves the weights
    assert all(row["grad_norm"] > 0 for row in rows)


def test_the_other_places_are_at_work_and_nobody_complains(finished):
    logs = {path.stem: path.read_text(errors="replace") for path in logs_of(finished[0])}
    assert "on 1 devices" in logs["learner"]
    assert {"validator-0", "validator-1", "relay-local", "relay-second"} <= logs.keys()
    complaints = [
        line
        for text in logs.values()
        for line in text.splitlines()
        if (" E " in line or " W " in line or "Traceback" in line)
        # (but of servers that were not up yet, and before anything is published)
        and not re.search("Cannot connect to host|Connection refused", line)
        and not (UNPUBLISHED in line and not re.search("version [0-9]+", text.split(line)[0]))
    ]
    assert complaints == []


def test_the_version_was_signed_and_published_anew_under_a_root_of_its_own(finished):
    run, _, root = finished
    assert (run.dir / "keys" / "root.key").read_bytes() != root
    assert newest_version(run.dir / "store" / "origin", run=run.name) == STEPS
    # whole, for nobody has what it could be a delta of, and those after it as deltas again
    publisher = (run.dir / "logs" / "publisher.log").read_text()
    assert "version 2 published whole" in publisher
    for version in range(3, load_resolved(run.dir).broadcast.anchor_every):
        assert f"version {version} published as a delta of version {version - 1}" in publisher
    with closing(Ledger(run.dir / STATE_FILE)) as ledger:
        events = list(ledger.events())
    assert [event.version for event in events if isinstance(event, RolledBack)] == [2]


def test_all_other_commands_work_on_it(finished):
    run = finished[0]
    for words in (["status"], ["describe"], ["events"], ["logs"], ["resume"]):
        done = runspec(*words, run.dir)
        assert done.returncode == 0, done.stderr
    assert runspec("wait", run.dir, "--for", "Finished").returncode == 0
    assert runspec("delete", run.dir, "--yes").returncode == 0


def logs_of(run):
    return sorted((run.dir / "logs").glob("*.log"))
