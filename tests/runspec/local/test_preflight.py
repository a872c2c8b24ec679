"""What keeps a run from starting: on machines of every kind, and every shipped spec on its site."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from runspec.cli.spec_files import located
from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.models.hardware import device_count
from runspec.core.models.spec_model import model_config
from runspec.core.roles import sign_roles
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import RunSpec, Tokenizer
from runspec.lint.check import check_spec
from runspec.local import planning, problems
from runspec.local.disk import disk_bytes
from runspec.local.endpoints import plan_endpoints, run_link, save_endpoints
from runspec.local.identity import Identity
from runspec.local.machine import Machine, find_model, this_machine, tpu_chips
from runspec.local.model_folders import link_model
from runspec.local.planning import make_plan
from runspec.local.preflight import GIB, Facts, Missing, missing
from runspec.local.problems import CheckedProblems, check_problems, with_problems
from runspec.local.processes import PreparedRun, role_specs
from tests.runspec.cli.in_process import runspec
from tests.runspec.core.spec.spec_files import SAMPLING, SPECS
from tests.runspec.local.fake_run import ROOT, prepared, small_spec
from tests.sampler.tasks.grading.plugin import install

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


def plenty(folder: Path) -> int:
    return 12_000 * GIB


def shipped(name: str) -> RunSpec:
    return check_spec(SpecFiles(SPECS / f"{name}.yaml"), environ={}).require()


def full(roles: list[str] | None) -> RunSpec:
    """The full run, with sixteen hosts of a learner; this machine starts the trunk and `roles`."""
    spec = shipped("target_long")
    assert spec.learner.hosts == 16
    placement = spec.placement.model_copy(update={"roles": roles})
    return spec.model_copy(update={"placement": placement})


def without(module: str) -> Callable[[str], bool]:
    return lambda name: name != module


NO_TRANSFORMERS = {"has_module": without("transformers")}
TORCH = NO_TRANSFORMERS | {"prefill_engines": ("jax", "torch")}
NO_DEVICE = "placement.devices.learner: no device 3: this machine has 2"
NO_VLLM, NO_WANDB = {"has_module": without("vllm")}, {"has_module": without("wandb")}
KINDS = "monitors=[{name: a, kind: tensorboard}, {name: b, kind: wandb}]"
TRACKIO = "monitors=[{name: c, kind: trackio, python: /no/python}]"


@pytest.mark.parametrize(
    ("override", "facts", "expected"),
    [
        ("", {}, ""),
        ("learner.hosts=2", {}, ""),  # a rehearsal
        ("", {"free_bytes": lambda _: GIB // 4}, "checkpoints: about 0.5 GiB of disk needed, 0.2"),
        ("", NO_TRANSFORMERS, ""),
        ("verify.engine=torch", TORCH, "verify.engine: engine torch imports transformers, not"),
        ("", {"prefill_engines": ()}, "verify.engine: no prefill engine 'jax'; installed: none"),
        ("", NO_VLLM, "placement.backend: Python packages not installed here: vllm (sampler)"),
        ("placement.devices={learner: [0, 3]}", {"gpus": ["NVIDIA L4"] * 2}, NO_DEVICE),
        ("secrets=[{name: T, from: {env: MINE}}]", {}, "secrets.T: the environment variable MINE"),
        (KINDS, NO_WANDB, "monitors.b: Python package not installed here: wandb"),
        (TRACKIO, {}, "monitors.c.python: no such file: /no/python"),
    ],
)
def test_a_laptop_lacks_what_it_lacks(
    tmp_path: Path, override: str, facts: dict[str, Any], expected: str
) -> None:
    spec = small_spec("small", 5, *filter(None, [override]))
    found = missing(spec, tmp_path, replace(LAPTOP, **facts))
    lines = [f"{item.path}: {item.thing}" for item in found]
    assert len(lines) == bool(expected) and all(line.startswith(expected) for line in lines)


HARDWARE = ("learner.hardware", "verify.hardware", "learner.hosts")
NO_TPU = "tpu-v5p x 4 (4 TPU chips); this machine has none"
OF_4 = "tpu-v5p 4x4x4 (64 TPU chips); this machine has 4"
HOSTS = "16 machines with tpu-v5p; this is one"
GPUS_24 = "h100-80g x 8 (8 H100 GPUs); this machine has none"
BESIDE = "h100-80g x 8 (8 H100 GPUs beside 16 of other roles); this machine has 23"


@pytest.mark.parametrize(
    ("roles", "facts", "expected"),
    [
        # the trunk starts one of the hosts, which asks for its share
        ([], {}, [NO_TPU, None, None]),
        ([], {"tpus": 3}, [NO_TPU.replace("none", "3"), None, None]),
        ([], {"tpus": 4}, [None, None, None]),
        (["learners"], {"tpus": 4}, [OF_4, None, HOSTS]),
        (["validators"], {"tpus": 4}, [None, GPUS_24, None]),
        # validators have none of those that the workers take
        (None, {"tpus": 64, "gpus": [H100] * 24}, [None, None, HOSTS]),
        (None, {"tpus": 64, "gpus": [*[H100] * 23, A100]}, [None, BESIDE, HOSTS]),
    ],
)
def test_accelerators_are_asked_for_by_what_starts_here(
    tmp_path: Path, roles: list[str] | None, facts: dict[str, Any], expected: list[str | None]
) -> None:
    found = missing(full(roles), tmp_path, replace(LAPTOP, **facts))
    things = {item.path: item.thing for item in found}
    assert [things.get(path) for path in HARDWARE] == expected
    for item in found:
        if item.path == "learner.hosts":
            assert "runspec prepare" in item.remedy and "docs/site.md" in item.remedy


def test_a_laptop_lacks_all_of_the_full_run(tmp_path: Path) -> None:
    found = {item.path: item.thing for item in missing(shipped("target_long"), tmp_path, LAPTOP)}
    assert list(found)[:4] == ["learner.hardware", "verify.hardware", "verify.engine", "model.hf"]
    assert "Qwen/QwQ-32B" in found["model.hf"]
    assert "is not on this machine" in found["data.sources.intellect2.uri"]
    # and a run without validators would never fill a step
    spec = small_spec()
    spec = spec.model_copy(update={"verify": spec.verify.model_copy(update={"validators": 0})})
    assert [item.path for item in missing(spec, tmp_path, LAPTOP)] == ["verify.validators"]
    # and islands need accelerators beside one another
    found = {
        item.path: item.thing
        for item in missing(shipped("opendiloco"), tmp_path, replace(LAPTOP, gpus=[H100] * 7))
    }
    assert [path for path in found if "hardware" in path] == ["learner.islands.members.7.hardware"]
    assert "beside 7 of other roles" in found["learner.islands.members.7.hardware"]


def test_only_what_is_started_here_is_asked_for(tmp_path: Path) -> None:
    # given a machine that runs the learner of a run whose pools and validators are elsewhere
    spec = full([])
    facts = replace(LAPTOP, tpus=64, free_bytes=plenty, prefill_engines=(), **NO_VLLM)
    # then it lacks neither GPUs nor vLLM nor a prefill engine, and relays may be anywhere
    assert {item.path for item in missing(spec, tmp_path, facts)} == {
        *("model.hf", "data.sources.intellect2.uri"),
    }
    # when a relay elsewhere has no address, then nobody could find it
    relays = [relay.model_copy(update={"url": None}) for relay in spec.broadcast.relays]
    broadcast = spec.broadcast.model_copy(update={"relays": relays})
    lost = missing(spec.model_copy(update={"broadcast": broadcast}), tmp_path, facts)
    assert f"broadcast.relays.{relays[0].name}.url" in [item.path for item in lost]


def test_a_run_on_documents_needs_its_files_and_a_tokenizer_and_nobody_who_grades(
    tmp_path: Path,
) -> None:
    # given the laptop profile of a run that makes its reads, then a laptop lacks nothing
    files = SpecFiles(SPECS / "metagene.yaml", "laptop")
    spec = located(check_spec(files, environ={}).require(), files.path.parent)
    assert missing(spec, tmp_path, LAPTOP) == []
    # but with the recipe's own source and tokenizer, or with none, it does
    recipe = shipped("metagene")
    for tokenizer in (recipe.model.tokenizer, None):
        model = spec.model.model_copy(update={"tokenizer": tokenizer})
        found = missing(
            spec.model_copy(update={"model": model, "data": recipe.data}), tmp_path, LAPTOP
        )
        assert [item.path for item in found] == [
            *("model.tokenizer", "data.sources.wastewater.uri"),
        ]


def test_what_a_pinned_root_asks_for_can_be_done_before_the_run_is_there(tmp_path: Path) -> None:
    # given a pinned root, and no directory of the run
    root, run_dir = SigningKey.generate(), tmp_path / "runs" / "small"
    spec = small_spec("small", 5, f"identity.root_public_key={root.public_hex}")
    (item,) = missing(spec, run_dir, LAPTOP)
    assert item.path == "identity.root_public_key"
    assert f"make the folder {run_dir / 'keys'}" in item.remedy
    # when that is followed
    names = ("publisher", "coordinator", "evaluator", "validator-0")
    keys = {name: SigningKey.generate() for name in names}
    for name, key in keys.items():
        key.save(run_dir / "keys" / f"{name}.key")
    held = {name.split("-")[0]: [key.public_hex] for name, key in keys.items()}
    data = sign_roles("small", held, root, valid_s=600.0)
    (run_dir / "keys" / "roles.json").write_bytes(data)
    # then nothing is missing, and the run is made there, with no root and no roles of its own
    assert missing(spec, run_dir, LAPTOP) == []
    with prepared(spec, tmp_path / "runs") as run:
        assert run.identity.root_public_key == root.public_hex
        assert run.identity.roles_file.read_bytes() == data
        assert not run.identity.key("root").exists()
        assert run.identity.key("volunteers-0").exists()


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


def test_disk_is_reckoned_from_the_shape(tmp_path: Path) -> None:
    # given hidden 64, 2 heads of 32 with 1 KV head, MLP 192, 3 layers, vocabulary 192, untied
    attention = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64
    layer = attention + 3 * 64 * 192 + 2 * 64
    parameters = 3 * layer + 2 * 192 * 64 + 64
    # then the disk holds 6 versions in 3 places of 4 bytes each with headers, 3 at the sampler
    # and 5 at the validator, who may be 2 steps behind, and 3 states of 12 bytes
    numbers = parameters * (4 * (6 * 3 + 3 + 5) + 12 * 3) + GIB // 2
    assert 0 < disk_bytes(small_spec(), model_config(small_spec())) - numbers < 26 * 5000
    # and where checkpoints have a disk of their own, each has to hold its part
    spec = small_spec("small", 5, f"checkpoints.dir={tmp_path}")
    poor = replace(LAPTOP, free_bytes=lambda folder: 0)
    assert [item.path for item in missing(spec, tmp_path / "run", poor)] == [
        *("storage", "checkpoints.dir"),
    ]


def test_a_model_is_found_in_a_directory_or_in_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Qwen--QwQ-32B" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    env = {"HF_HOME": str(tmp_path)}
    assert find_model("Qwen/QwQ-32B", REVISION, env) is None, "without weights"
    (snapshot / "model.safetensors").write_bytes(bytes(8))
    assert find_model("Qwen/QwQ-32B", REVISION, env) == snapshot
    assert find_model("Qwen/QwQ-32B", None, env) is None, "which commit `main` is was never asked"
    main = snapshot.parent.parent / "refs" / "main"
    main.parent.mkdir()
    main.write_text(REVISION)
    assert find_model("Qwen/QwQ-32B", None, env) == snapshot
    assert find_model(str(snapshot), None, {}) == snapshot
    assert find_model("../../etc", "passwd", env) is None


def of_model(model: Path, tokenizer: Path) -> RunSpec:
    spec = small_spec()
    words = {"hf": str(model), "shape": None, "tokenizer": Tokenizer(hf=str(tokenizer))}
    changed = {"model": spec.model.model_copy(update=words), "warm_start": None}
    return spec.model_copy(update=changed)


def test_another_tokenizer_takes_the_place_of_the_models_own_if_it_fits(tmp_path: Path) -> None:
    # given a model of 10 rows with a tokenizer of its own, and another tokenizer
    model, other, initial = (tmp_path / name for name in ("model", "other", "initial"))
    for each, template in ((model, "old"), (other, "new")):
        each.mkdir()
        (each / "chat_template.jinja").write_text(template)
    config = json.loads((ROOT / "runspec/core/models/named/Qwen--Qwen3-4B.json").read_text())
    config |= {"vocab_size": 10, "num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(bytes(8))
    for name in ("added_tokens.json", "tokenizer.json"):
        (model / name).write_text("{}")

    def lacking(largest: int) -> list[Missing]:
        added = [{"content": "b", "id": largest}]
        tokens = {"model": {"vocab": {"a": 0}}, "added_tokens": added}
        (other / "tokenizer.json").write_text(json.dumps(tokens))
        return missing(of_model(model, other), tmp_path, LAPTOP)

    # then one with a larger id is refused
    (item,) = lacking(largest=10)
    assert item.path == "model.tokenizer"
    assert "largest token id is 10, the model's vocabulary has 10 rows" in item.thing
    with pytest.raises(UserError, match="largest token id is 10"):
        link_model(initial, model, other)
    # and with one that fits, weights are the model's, tokenizer and template the other's
    assert lacking(largest=9) == []
    for _ in range(2):
        link_model(initial, model, other)
    assert (initial / "model.safetensors").resolve() == model / "model.safetensors"
    assert (initial / "tokenizer.json").resolve() == other / "tokenizer.json"
    assert (initial / "chat_template.jinja").read_text() == "new"
    assert not (initial / "added_tokens.json").exists()
    # and without another tokenizer it is the model's directory
    link_model(initial, model, None)
    assert initial.readlink() == model
    # and a path without a tokenizer is named
    for folder, thing in (
        (tmp_path / "gone", f"no directory {tmp_path / 'gone'}"),
        (tmp_path, f"the directory {tmp_path} has no tokenizer.json"),
    ):
        (item,) = missing(of_model(model, folder), tmp_path, LAPTOP)
        assert (item.path, item.thing) == ("model.tokenizer", thing)


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
        monkeypatch.setattr(problems, "SHOWN_AFTER_S", -1.0)
        monkeypatch.setattr(problems, "time", Clock(told))
    # when the problems are read, then that ends, and is named with what it was at
    (lacking,) = check_problems(spec, this_machine(), told.append).lacking
    assert lacking.path == "data.sources" and said in lacking.thing
    assert "importing the kind odd of reward" in lacking.thing
    if "sleep" in plugin:
        assert told[-1] == "reading the problems: importing the kind odd of reward"


def test_only_a_run_that_is_new_or_changed_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = check_problems(small_spec(), this_machine(), print)
    assert checked.lacking == [] and len(checked.notes) == 1
    found, other = [Missing("data.sources.words", "a fault")], [Missing("model.hf", "gone")]
    monkeypatch.setattr(problems, "check_problems", lambda *_: CheckedProblems(found, []))
    plan = make_plan(small_spec(), tmp_path / "small")
    known = replace(plan, seen=replace(plan.seen, spec_digest="d"))
    for each, expected in (
        (plan, found),
        (known, found),
        (replace(known, changes=[]), []),
        (replace(plan, held_by="process 1"), []),
        (replace(plan, lacking=other), other),
    ):
        assert with_problems(each, this_machine(), print).lacking == expected


PLACEMENTS = [None, *sorted((SPECS / "placements").glob("*.yaml"))]
KEY = SigningKey.generate().public_hex


def fake_model(home: Path) -> None:
    """The shape of QwQ-32B with weights of no use, where `hf download` would put it."""
    cached = home / "hub" / "models--Qwen--QwQ-32B"
    snapshot = cached / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(snapshot.name)
    shutil.copy(ROOT / "runspec/core/models/named/Qwen--QwQ-32B.json", snapshot / "config.json")
    (snapshot / "model.safetensors").write_bytes(bytes(8))
    (snapshot / "tokenizer.json").write_text("{}")


def fake_site(spec: RunSpec, home: Path) -> Facts:
    """As many devices as the roles that start here need, and room for what they write."""
    assert spec.verify.hardware is not None
    asked = [(spec.learner.hardware, 1), (spec.verify.hardware, spec.verify.validators)]
    here = spec.placement.roles or []
    asked += [(pool.hardware, pool.replicas) for pool in spec.samplers if pool.name in here]
    devices = [hw.kind for hw, many in asked for _ in range(many * (device_count(hw) or 0))]
    return replace(
        LAPTOP,
        machine=Machine("python", tuple(range(64)), {"HF_HOME": str(home)}),
        gpus=[f"NVIDIA {kind.upper()}" for kind in devices if not kind.startswith("tpu")],
        tpus=sum(kind.startswith("tpu") for kind in devices),
        free_bytes=plenty,
        prefill_engines=("jax", "torch"),
    )


@pytest.mark.parametrize(
    ("recipe", "placement"),
    list(product(SAMPLING, PLACEMENTS)),
    ids=lambda path: path.stem if path else "alone",
)
def test_a_shipped_spec_is_clean_and_lacks_nothing_on_its_site(
    recipe: Path, placement: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given the site, with the weights where they belong
    files = SpecFiles(recipe, placement=placement)
    spec = check_spec(files, environ={}).require()
    fake_model(tmp_path / "hf")
    monkeypatch.setattr(planning, "look", lambda: fake_site(spec, tmp_path / "hf"))
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
    if "volunteers" not in (spec.placement.roles or []):
        assert {"https://run.example.org", "https://origin.example.org"} < urls
        assert all(url.startswith("https://") for url in urls)
        # and the proxies find the servers at ports that stay
        ports = {endpoints.coordinator, endpoints.origin}
        assert ports == {"http://127.0.0.1:8200", "http://127.0.0.1:8201"}
