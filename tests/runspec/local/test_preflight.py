"""What keeps a run from starting: on machines of every kind, and every shipped spec on its site."""

from __future__ import annotations

import json
import random
import shutil
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.models import device_count
from runspec.core.models.family import model_config
from runspec.core.process import save_endpoints
from runspec.core.roles import sign_roles
from runspec.core.schema import RunSpec, Tokenizer
from runspec.core.schema.load import SpecFiles, dump_resolved
from runspec.core.signed import SigningKey
from runspec.lint.check import check_spec
from runspec.local import planning
from runspec.local.endpoints import plan_endpoints, run_link
from runspec.local.identity import Identity
from runspec.local.machine import Facts, Machine, find_model, this_machine, tpu_chips
from runspec.local.model_folders import link_model
from runspec.local.planning import check_problems, make_plan
from runspec.local.preflight import disk_bytes, missing
from runspec.local.processes import PreparedRun, role_specs
from tests.runspec.cli.in_process import runspec
from tests.runspec.core.schema.spec_files import SAMPLING, SPECS
from tests.runspec.local.fake_run import ROOT, prepared, small_spec
from tests.sampler.tasks.grading.plugin import install

GIB = 2**30

pytestmark = pytest.mark.slow

REVISION = "0123456789abcdef0123456789abcdef01234567"
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
LAPTOP = Facts(
    machine=Machine("python", (0, 1), {}),
    gpus=(),
    tpus=0,
    free_bytes=lambda folder: 100 * GIB,
    has_module=lambda name: True,
    prefill_engines=("jax",),
)
ROOMY: dict[str, Any] = {"free_bytes": lambda folder: 12_000 * GIB}


def shipped(name: str, roles: list[str] | None = None) -> RunSpec:
    """A recipe; this machine starts the trunk and `roles`, or everything."""
    spec = check_spec(SpecFiles(SPECS / f"{name}.yaml"), environ={}).require()
    placement = spec.placement.model_copy(update={"roles": roles})
    return spec.model_copy(update={"placement": placement})


def lacks(module: str) -> dict[str, Any]:
    return {"has_module": lambda name: name != module}


TORCH = lacks("transformers") | {"prefill_engines": ("jax", "torch")}
NO_DEVICE = "placement.devices.learner: no device 3: this machine has 2"
TRACKIO = "monitors=[{name: c, kind: trackio, python: /no/python}]"


@pytest.mark.parametrize(
    ("override", "facts", "expected"),
    [
        ("learner.hosts=2", {}, ""),  # a rehearsal
        ("seed=1", {"free_bytes": lambda _: GIB // 4}, "checkpoints: about 559 MB of disk needed"),
        ("seed=1", {"memory": lambda: 1e5}, "model.shape: version 0 is drawn in 691 kB of main"),
        ("seed=1", {"memory": lambda: 1e9}, ""),
        ("seed=1", lacks("transformers"), ""),
        ("verify.engine=torch", TORCH, "verify.engine: engine torch imports transformers, not"),
        ("seed=1", {"prefill_engines": ()}, "verify.engine: no prefill engine 'jax'; installed: "),
        ("seed=1", lacks("vllm"), "placement.backend: Python packages not installed here: vllm ("),
        ("placement.devices={learner: [0, 3]}", {"gpus": ["NVIDIA L4"] * 2}, NO_DEVICE),
        ("secrets=[{name: T, from: {env: MINE}}]", {}, "secrets.T: the environment variable MINE"),
        ("monitors=[{name: b, kind: wandb}]", lacks("wandb"), "monitors.b: Python package not"),
        (TRACKIO, {}, "monitors.c.python: no such file: /no/python"),
    ],
)
def test_a_laptop_lacks_what_it_lacks(
    tmp_path: Path, override: str, facts: dict[str, Any], expected: str
) -> None:
    found = missing(small_spec("small", 5, override), tmp_path, replace(LAPTOP, **facts))
    lines = [f"{item.path}: {item.thing}" for item in found]
    assert len(lines) == bool(expected) and all(line.startswith(expected) for line in lines)


HARDWARE = ("learner.hardware", "verify.hardware", "learner.hosts")
NO_TPU = "tpu-v5p x 4 (4 TPU chips); this machine has none"
OF_4 = "tpu-v5p 4x4x4 (64 TPU chips); this machine has 4"
HOSTS = "16 machines with tpu-v5p; this is one"
GPUS_24 = "h100-80g x 8 (8 H100 GPUs); this machine has none"
BESIDE = "h100-80g x 8 (8 H100 GPUs beside 72 of other roles); this machine has 79"


@pytest.mark.parametrize(
    ("roles", "facts", "expected"),
    [
        # the trunk starts one of the hosts, which asks for its share
        ([], {}, [NO_TPU, None, None]),
        ([], {"tpus": 4}, [None, None, None]),
        (["learners"], {"tpus": 4}, [OF_4, None, HOSTS]),
        (["validators"], {"tpus": 4}, [None, GPUS_24, None]),
        # validators have none of those that the workers take
        (None, {"tpus": 64, "gpus": [H100] * 80}, [None, None, HOSTS]),
        (None, {"tpus": 64, "gpus": [*[H100] * 79, A100]}, [None, BESIDE, HOSTS]),
    ],
)
def test_accelerators_are_asked_for_by_what_starts_here(
    tmp_path: Path, roles: list[str] | None, facts: dict[str, Any], expected: list[str | None]
) -> None:
    found = missing(shipped("target_long", roles), tmp_path, replace(LAPTOP, **facts))
    things = {item.path: item.thing for item in found}
    assert [things.get(path) for path in HARDWARE] == expected


def test_islands_need_devices_beside_one_another_and_roles_elsewhere_need_none(
    tmp_path: Path,
) -> None:
    seven = replace(LAPTOP, gpus=[H100] * 7)
    found = {item.path: item.thing for item in missing(shipped("opendiloco"), tmp_path, seven)}
    assert [path for path in found if "hardware" in path] == ["learner.islands.members.7.hardware"]
    assert "beside 7 of other roles" in found["learner.islands.members.7.hardware"]
    # given a machine that runs the learner of a run whose pools and validators are elsewhere
    spec = shipped("target_long", [])
    facts = replace(LAPTOP, tpus=64, prefill_engines=(), **ROOMY, **lacks("vllm"))
    # then it lacks neither GPUs nor vLLM nor a prefill engine
    paths = {item.path for item in missing(spec, tmp_path, facts)}
    assert paths == {"model.hf", "data.sources.intellect2.uri"}
    # when a relay elsewhere has no address, then nobody could find it
    relays = [relay.model_copy(update={"url": None}) for relay in spec.broadcast.relays]
    broadcast = spec.broadcast.model_copy(update={"relays": relays})
    lost = missing(spec.model_copy(update={"broadcast": broadcast}), tmp_path, facts)
    assert f"broadcast.relays.{relays[0].name}.url" in [item.path for item in lost]
    # and a run without validators would never fill a step
    spec = small_spec()
    spec = spec.model_copy(update={"verify": spec.verify.model_copy(update={"validators": 0})})
    assert [item.path for item in missing(spec, tmp_path, LAPTOP)] == ["verify.validators"]


def test_what_a_pinned_root_asks_for_can_be_done_before_the_run_is_there(tmp_path: Path) -> None:
    # given a pinned root, and no directory of the run
    root, run_dir = SigningKey.generate(), tmp_path / "runs" / "small"
    spec = small_spec("small", 5, f"identity.root_public_key={root.public_hex}")
    (item,) = missing(spec, run_dir, LAPTOP)
    assert item.path == "identity.root_public_key"
    assert f"make the folder {run_dir / 'keys'}" in item.remedy
    # when that is followed
    held = {}
    for name in ("publisher", "coordinator", "evaluator", "validator-0"):
        key = SigningKey.generate()
        key.save(run_dir / "keys" / f"{name}.key")
        held[name.split("-")[0]] = [key.public_hex]
    data = sign_roles("small", held, root, valid_s=600.0)
    (run_dir / "keys" / "roles.json").write_bytes(data)
    # then nothing is missing, and the run is made there, with no root and no roles of its own
    assert missing(spec, run_dir, LAPTOP) == []
    with prepared(spec, tmp_path / "runs") as run:
        assert run.identity.root_public_key == root.public_hex
        assert run.identity.roles_file.read_bytes() == data
        assert not run.identity.key("root").exists()


@pytest.mark.parametrize("folder", ["small/state", "small/islands/1/state"])
def test_a_new_run_does_not_go_on_from_the_states_of_an_earlier_namesake(
    tmp_path: Path, folder: str
) -> None:
    # given full states of a run that was deleted
    spec = small_spec("small", 5, f"checkpoints.dir={tmp_path}", "learner.islands.count=2")
    (tmp_path / folder / "step_4").mkdir(parents=True)
    run_dir = tmp_path / "runs" / "small"
    assert [item.path for item in missing(spec, run_dir, LAPTOP)] == ["checkpoints.dir"]
    # but a run that is there has them for its own
    run_dir.mkdir(parents=True)
    (run_dir / "spec.json").write_bytes(dump_resolved(spec))
    assert missing(spec, run_dir, LAPTOP) == []


def test_disk_is_reckoned_from_the_shape() -> None:
    # given hidden 64, 2 heads of 32 with 1 KV head, MLP 192, 3 layers, vocabulary 192, untied
    attention = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64
    layer = attention + 3 * 64 * 192 + 2 * 64
    parameters = 3 * layer + 2 * 192 * 64 + 64
    # then the disk holds 6 versions in 3 places of 4 bytes each with headers, 3 states of 12 bytes,
    # and once what is read: 5 with a validator, who may be 2 steps behind; without one 2 more than
    # there are samplers
    for overrides, read in (
        ([], 5),
        (["samplers.volunteers.replicas=8"], 5),
        (["placement.roles=[volunteers]"], 3),
        (["placement.roles=[volunteers]", "samplers.volunteers.replicas=2"], 4),
        (["placement.roles=[volunteers]", "samplers.volunteers.replicas=8"], 5),
        (["placement.roles=[]"], 0),
    ):
        spec = small_spec("small", 5, *overrides)
        places = 2 if "roles" in str(overrides) else 3  # the relay's is elsewhere too
        numbers = parameters * (4 * (6 * places + read) + 12 * 3) + GIB // 2
        assert 0 < disk_bytes(spec, model_config(spec)) - numbers < 26 * 5000, overrides


def test_another_tokenizer_takes_the_place_of_the_models_own_if_it_fits(tmp_path: Path) -> None:
    # given a model of 10 rows with a tokenizer of its own, and another tokenizer
    model, other, initial = (tmp_path / name for name in ("model", "other", "initial"))
    write_atomic(model / "chat_template.jinja", b"old")
    write_atomic(other / "chat_template.jinja", b"new")
    config = json.loads((ROOT / "runspec/core/models/named/Qwen--Qwen3-4B.json").read_text())
    config |= {"vocab_size": 10, "num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(bytes(8))
    for name in ("added_tokens.json", "tokenizer.json"):
        (model / name).write_text("{}")

    def lacking(tokenizer: Path, largest: int = 9) -> list[tuple[str, str]]:
        added = [{"content": "b", "id": largest}]
        tokens = {"model": {"vocab": {"a": 0}}, "added_tokens": added}
        (other / "tokenizer.json").write_text(json.dumps(tokens))
        spec = small_spec()
        words = {"hf": str(model), "shape": None, "tokenizer": Tokenizer(hf=str(tokenizer))}
        changed = {"model": spec.model.model_copy(update=words), "warm_start": None}
        found = missing(spec.model_copy(update=changed), tmp_path, LAPTOP)
        return [(item.path, item.thing) for item in found]

    # then one with a larger id is refused, and a path without a tokenizer is named
    [(path, thing)] = lacking(other, largest=10)
    assert path == "model.tokenizer"
    assert "largest token id is 10, the model's vocabulary has 10 rows" in thing
    with pytest.raises(UserError, match="largest token id is 10"):
        link_model(initial, model, other)
    thing = f"the directory {tmp_path} has no tokenizer.json"
    assert lacking(tmp_path) == [("model.tokenizer", thing)]
    # and with one that fits, weights are the model's, tokenizer and template the other's
    assert lacking(other) == []
    link_model(initial, model, other)
    assert (initial / "model.safetensors").resolve() == model / "model.safetensors"
    assert (initial / "tokenizer.json").resolve() == other / "tokenizer.json"
    assert (initial / "chat_template.jinja").read_text() == "new"
    assert not (initial / "added_tokens.json").exists()
    # and without another tokenizer it is the model's directory
    link_model(initial, model, None)
    assert initial.readlink() == model


@pytest.fixture
def model_cache(tmp_path: Path) -> Path:
    """The shape of QwQ-32B with weights of no use, where `hf download` would put it."""
    cached = tmp_path / "hf" / "hub" / "models--Qwen--QwQ-32B"
    snapshot = cached / "snapshots" / REVISION
    write_atomic(cached / "refs" / "main", REVISION.encode())
    write_atomic(snapshot / "model.safetensors", bytes(8))
    write_atomic(snapshot / "tokenizer.json", b"{}")
    shutil.copy(ROOT / "runspec/core/models/named/Qwen--QwQ-32B.json", snapshot / "config.json")
    return tmp_path / "hf"


def test_a_model_is_found_in_a_directory_or_in_the_cache(model_cache: Path) -> None:
    env, folder = {"HF_HOME": str(model_cache)}, model_cache / "hub" / "models--Qwen--QwQ-32B"
    snapshot = folder / "snapshots" / REVISION
    for revision in (REVISION, None):
        assert find_model("Qwen/QwQ-32B", revision, env) == snapshot
    assert find_model(str(snapshot), None, {}) == snapshot
    assert find_model("../../etc", "passwd", env) is None
    (folder / "refs" / "main").unlink()
    assert find_model("Qwen/QwQ-32B", None, env) is None, "which commit `main` is was never asked"
    (snapshot / "model.safetensors").unlink()
    assert find_model("Qwen/QwQ-32B", REVISION, env) is None, "without weights"


def test_tpu_chips_are_counted_by_their_pci_devices(tmp_path: Path) -> None:
    """v5e, v5p and v6e have no /dev/accel*."""
    devices = {"a": ("0x1ae0", "0x0062"), "b": ("0x1ae0", "0x0062"), "c": ("0x1ae0", "0x0042")}
    for name, (vendor, device) in (devices | {"d": ("0x10de", "0x0062")}).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "device").write_text(f"{device}\n")
    assert tpu_chips(tmp_path) == 2


class Clock:
    """Stands until the problems' process has said what it is at, and then runs fast."""

    def __init__(self, told: list[str]) -> None:
        self._told, self._now = told, 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        self._now += 1000.0 * any("importing the kind odd" in line for line in self._told)
        return self._now


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("time.sleep(6000)", "said nothing for 300 s; its last lines:"),
        ("import os; os._exit(9)", "ended with exit code 9; its last lines:"),
    ],
)
def test_a_plugin_that_hangs_or_ends_the_process_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: str, said: str
) -> None:
    # given a reward whose package does something when it is imported
    points = "[runspec.rewards]\nodd = odd_kinds:Odd\n"
    install(tmp_path, monkeypatch, "odd_kinds", points, f"print('hello')\nimport time\n{plugin}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec, told = small_spec("small", 5, "reward.odd.kind=odd"), list[str]()
    if "sleep" in plugin:
        monkeypatch.setattr(planning, "SHOWN_AFTER_S", -1.0)
        monkeypatch.setattr(planning, "time", Clock(told))
    # when the problems are read, then that ends, and is named with what it was at
    (lacking,) = check_problems(spec, this_machine(), told.append).lacking
    assert lacking.path == "data.sources" and said in lacking.thing
    assert "importing the kind odd of reward" in lacking.thing
    if "sleep" in plugin:
        assert told[-1] == "reading the problems: importing the kind odd of reward"


PLACEMENTS = [None, *sorted((SPECS / "placements").glob("*.yaml"))]
KEY = SigningKey.generate().public_hex


@pytest.mark.parametrize(
    ("recipe", "placement"),
    list(product(SAMPLING, PLACEMENTS)),
    ids=lambda path: path.stem if path else "alone",
)
def test_a_shipped_spec_is_clean_and_lacks_nothing_on_its_site(
    recipe: Path,
    placement: Path | None,
    model_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given as many devices as the roles that start here need, and the weights where they belong
    spec = check_spec(SpecFiles(recipe, placement=placement), environ={}).require()
    assert spec.verify.hardware is not None
    asked = [(spec.learner.hardware, 1), (spec.verify.hardware, spec.verify.validators)]
    here = spec.placement.roles or []
    asked += [(pool.hardware, pool.replicas) for pool in spec.samplers if pool.name in here]
    devices = [hw.kind for hw, many in asked for _ in range(many * (device_count(hw) or 0))]
    facts = replace(
        LAPTOP,
        machine=Machine("python", tuple(range(64)), {"HF_HOME": str(model_cache)}),
        gpus=[f"NVIDIA {kind.upper()}" for kind in devices if not kind.startswith("tpu")],
        tpus=sum(kind.startswith("tpu") for kind in devices),
        prefill_engines=("jax", "torch"),
        **ROOMY,
    )
    monkeypatch.setattr(planning, "look", lambda: facts)
    # then at most problems are missing and hosts: the backend `local` has one machine
    plan = make_plan(spec, tmp_path / "runs" / spec.name)
    lacking = {item.path for item in plan.lacking}
    assert lacking <= {"learner.hosts", "data.sources.intellect2.uri"}
    # and the linter finds nothing
    done = runspec("lint", recipe, *(["--placement", placement] if placement else []))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    # and each validator, and each worker that is on this machine, has GPUs of its own
    endpoints = plan_endpoints(spec, None, lambda host, port: True, random.Random(0))
    keys, machine = Identity(tmp_path / "keys", KEY), Machine("python", (0, 1), {})
    if spec.placement.backend == "local":
        roles = role_specs(PreparedRun(spec, tmp_path, endpoints, keys, machine, lock=-1))
        given = [
            role.env["CUDA_VISIBLE_DEVICES"].split(",")
            for role in roles
            if role.name.startswith(("validator-", "volunteers-"))
        ]
        numbers = [number for each in given for number in each]
        assert {len(each) for each in given} == {2}
        assert len(numbers) == len(set(numbers)) > 0
    # and links, and what the coordinator says of relays and origin, name what strangers reach
    save_endpoints(tmp_path, endpoints)
    pinned = spec.identity.model_copy(update={"root_public_key": KEY})
    link = run_link(tmp_path, spec.model_copy(update={"identity": pinned}))
    assert link is not None
    urls = {link.coordinator, *endpoints.weights()}
    assert all(url.startswith("http://127.0.0.1:") for url in endpoints.all().values())
    if "volunteers" not in here:
        assert {"https://run.example.org", "https://origin.example.org"} < urls
        assert all(url.startswith("https://") for url in urls)
        # and the proxies find the servers at ports that stay
        ports = {endpoints.coordinator, endpoints.origin}
        assert ports == {"http://127.0.0.1:8200", "http://127.0.0.1:8201"}
