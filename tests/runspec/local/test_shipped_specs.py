"""Every shipped spec of a run that samples, with every placement and none, starts on its site.

Fake are the site's devices, disk and installed packages, the weights and the problems.
"""

from __future__ import annotations

import json
import random
import shutil
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runspec.core.models.hardware import device_count
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.schema import RunSpec
from runspec.lint.check import check_spec
from runspec.local import planning
from runspec.local.endpoints import plan_endpoints, run_link, save_endpoints
from runspec.local.identity import Identity
from runspec.local.machine import Machine
from runspec.local.preflight import GIB, Facts
from runspec.local.processes import PreparedRun, role_specs
from tests.harness import ROOT
from tests.runspec.cli.in_process import runspec
from tests.runspec.core.spec.spec_files import SAMPLING, SPECS

pytestmark = pytest.mark.slow

PLACEMENTS = [None, *sorted((SPECS / "placements").glob("*.yaml"))]
SITES = list(product(SAMPLING, PLACEMENTS))
KEY = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"  # RFC 8032's first test
every_site = pytest.mark.parametrize(
    ("recipe", "placement"), SITES, ids=lambda path: path.stem if path else "alone"
)


def spec_of(recipe: Path, placement: Path | None) -> RunSpec:
    return check_spec(SpecFiles(recipe, placement=placement), environ={}).require()


def fake_model(home: Path) -> None:
    """The shape of QwQ-32B with weights of no use, where `hf download` would put it."""
    cached = home / "hub" / "models--Qwen--QwQ-32B"
    snapshot = cached / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(snapshot.name)
    shutil.copy(ROOT / "runspec/core/models/named/Qwen--QwQ-32B.json", snapshot / "config.json")
    (snapshot / "model.safetensors").write_bytes(bytes(8))
    (snapshot / "tokenizer.json").write_text("{}")


def fake_problems(folder: Path) -> Path:
    """One row with the columns of the paper's data set."""
    row = {
        "problem_id": "1",
        "task_type": "verifiable_math",
        "prompt": "1 + 1?",
        "verification_info": "{}",
        "solve_rate_qwen_r1_distill_7b": 0.25,
    }
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist([row]), folder / "train-00000-of-00001.parquet")
    return folder


def fake_site(spec: RunSpec, home: Path) -> Facts:
    """As many devices as the roles that start here need, and room for what they write."""
    assert spec.verify.hardware is not None
    asked = [(spec.learner.hardware, 1), (spec.verify.hardware, spec.verify.validators)]
    asked += [
        (pool.hardware, pool.replicas)
        for pool in spec.samplers
        if pool.name in (spec.placement.roles or [])
    ]
    devices = [hw.kind for hw, many in asked for _ in range(many * (device_count(hw) or 0))]
    return Facts(
        machine=Machine("python", tuple(range(64)), {"HF_HOME": str(home)}),
        gpus=[f"NVIDIA {kind.upper()}" for kind in devices if not kind.startswith("tpu")],
        tpus=sum(kind.startswith("tpu") for kind in devices),
        free_bytes=lambda folder: 12_000 * GIB,
        has_module=lambda name: True,
        prefill_engines=("jax", "torch"),
    )


@every_site
def test_on_its_site_it_lacks_nothing(
    recipe: Path, placement: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given the site, with the weights and the problems where they belong
    fake_model(tmp_path / "hf")
    facts = fake_site(spec_of(recipe, placement), tmp_path / "hf")
    monkeypatch.setattr(planning, "look", lambda: facts)
    problems = f"data.sources.intellect2.uri={fake_problems(tmp_path / 'problems')}"
    where = ["--placement", placement] if placement else []
    # when the run is planned
    done = runspec(
        *("plan", recipe, *where, "--set", problems, "--runs-dir", tmp_path / "runs", "--json")
    )
    # then at most the backend keeps it from starting: `local` has one machine
    assert done.returncode == 0, done.stderr
    assert {item["path"] for item in json.loads(done.stdout)["lacking"]} <= {"learner.hosts"}


@every_site
def test_linted_it_is_clean(recipe: Path, placement: Path | None) -> None:
    where = ["--placement", placement] if placement else []
    done = runspec("lint", recipe, *where)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@every_site
def test_no_two_roles_have_one_device_and_strangers_are_told_of_proxies_alone(
    recipe: Path, placement: Path | None, tmp_path: Path
) -> None:
    # given the roles that start here
    spec = spec_of(recipe, placement)
    endpoints = plan_endpoints(spec, None, lambda host, port: True, random.Random(0))
    keys, machine = Identity(tmp_path / "keys", KEY), Machine("python", (0, 1), {})
    roles = role_specs(PreparedRun(spec, tmp_path, endpoints, keys, machine, lock=-1))
    # then each validator, and each worker that is on this machine, has GPUs of its own
    if spec.placement.backend == "local":
        seen = [role.env["CUDA_VISIBLE_DEVICES"] for role in roles if needs_gpus(role.name)]
        given = [each.split(",") for each in seen]
        assert {len(each) for each in given} == {2}
        numbers = [number for each in given for number in each]
        assert len(numbers) == len(set(numbers)) > 0
    # and links, and what the coordinator tells of relays and origin, name what strangers reach
    save_endpoints(tmp_path, endpoints)
    pinned = spec.model_copy(
        update={"identity": spec.identity.model_copy(update={"root_public_key": KEY})}
    )
    link = run_link(tmp_path, pinned)
    assert link is not None
    urls = {link.coordinator, *endpoints.weights()}
    assert all(url.startswith("http://127.0.0.1:") for url in endpoints.all().values())
    if "volunteers" not in (spec.placement.roles or []):
        assert {"https://run.example.org", "https://origin.example.org"} < urls
        assert all(url.startswith("https://") for url in urls)
        # and the proxies find the servers at ports that stay
        assert (endpoints.coordinator, endpoints.origin) == (
            "http://127.0.0.1:8200",
            "http://127.0.0.1:8201",
        )


def needs_gpus(role: str) -> bool:
    return role.startswith(("validator-", "volunteers-"))
