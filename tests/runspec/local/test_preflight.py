"""What keeps a run from starting, on machines of every kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runspec.cli.spec_files import located
from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.models.spec_model import model_config
from runspec.core.roles import sign_roles
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import RunSpec, Tokenizer
from runspec.lint.check import check_spec
from runspec.local.disk import disk_bytes
from runspec.local.machine import Machine, find_model, tpu_chips
from runspec.local.model_folders import link_model
from runspec.local.preflight import GIB, Facts, missing
from tests.runspec.local.fake_run import ROOT, prepared, small_spec

REVISION = "0123456789abcdef0123456789abcdef01234567"
LAPTOP = Facts(
    machine=Machine("python", (0, 1), {}),
    gpus=(),
    tpus=0,
    free_bytes=lambda folder: 100 * GIB,
    has_module=lambda name: True,
    prefill_engines=("jax",),
)


@pytest.fixture
def full_spec() -> RunSpec:
    return check_spec(SpecFiles(ROOT / "specs" / "target_long.yaml"), environ={}).require()


def model_in_cache(home: Path) -> Path:
    snapshot = home / "hub" / "models--Qwen--QwQ-32B" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(bytes(1000))
    return snapshot


def paths(spec: RunSpec, facts: Facts, run_dir: Path) -> list[str]:
    return [item.path for item in missing(spec, run_dir, facts)]


def test_the_laptop_profile_lacks_nothing_on_a_laptop(tmp_path: Path) -> None:
    assert missing(small_spec(), tmp_path, LAPTOP) == []


def test_a_run_on_documents_needs_its_files_and_a_tokenizer_and_nobody_who_grades(
    tmp_path: Path,
) -> None:
    # given the laptop profile of a run that makes its reads
    files = SpecFiles(ROOT / "specs" / "metagene.yaml", "laptop")
    spec = located(check_spec(files, environ={}).require(), files.path.parent)
    # then a laptop lacks nothing
    assert missing(spec, tmp_path, LAPTOP) == []
    # but with the recipe's own source and tokenizer it does
    recipe = check_spec(SpecFiles(files.path), environ={}).require()
    model = spec.model.model_copy(update={"tokenizer": recipe.model.tokenizer})
    spec = spec.model_copy(update={"model": model, "data": recipe.data})
    assert paths(spec, LAPTOP, tmp_path) == ["model.tokenizer", "data.sources.wastewater.uri"]


def test_islands_need_accelerators_beside_one_another(tmp_path: Path) -> None:
    spec = check_spec(SpecFiles(ROOT / "specs" / "opendiloco.yaml"), environ={}).require()
    facts = replace(LAPTOP, gpus=["NVIDIA H100 80GB HBM3"] * 7)
    found = {item.path: item.thing for item in missing(spec, tmp_path, facts)}
    assert [path for path in found if "hardware" in path] == ["learner.islands.members.7.hardware"]
    assert "beside 7 of other roles" in found["learner.islands.members.7.hardware"]


def test_a_laptop_lacks_all_of_the_full_run(full_spec: RunSpec, tmp_path: Path) -> None:
    found = {item.path: item.thing for item in missing(full_spec, tmp_path, LAPTOP)}
    assert list(found)[:4] == [
        "learner.hardware",
        "verify.hardware",
        "verify.engine",
        "model.hf",
    ]
    assert "tpu-v5p x 4 (4 TPU chips)" in found["learner.hardware"], "of one of its hosts"
    assert "h100-80g x 8" in found["verify.hardware"]
    assert "Qwen/QwQ-32B" in found["model.hf"]
    assert "is not on this machine" in found["data.sources.intellect2.uri"]


def test_hardware_that_is_there_is_not_missed(full_spec: RunSpec, tmp_path: Path) -> None:
    placement = full_spec.placement.model_copy(update={"roles": None})
    spec = full_spec.model_copy(update={"placement": placement})
    facts = replace(LAPTOP, tpus=64, gpus=["NVIDIA H100 80GB HBM3"] * 24)
    left = paths(spec, facts, tmp_path)
    assert not any("hardware" in path for path in left)
    other = replace(facts, gpus=["NVIDIA H100 80GB HBM3"] * 23 + ["NVIDIA A100-SXM4-80GB"])
    lacking = {item.path: item.thing for item in missing(spec, tmp_path, other)}
    # then validators have none of those that the workers take
    assert lacking["verify.hardware"] == (
        "h100-80g x 8 (8 H100 GPUs beside 16 of other roles); this machine has 23"
    )


def test_several_hosts_are_a_rehearsal_on_a_cpu_and_machines_elsewhere(
    full_spec: RunSpec, tmp_path: Path
) -> None:
    # given a run of which one machine is to start everything
    placement = full_spec.placement.model_copy(update={"roles": None})
    spread = full_spec.model_copy(update={"placement": placement})
    assert spread.learner.hosts == 16
    found = {item.path: item for item in missing(spread, tmp_path, LAPTOP)}
    assert "tpu-v5p 4x4x4 (64 TPU chips)" in found["learner.hardware"].thing
    hosts = found["learner.hosts"]
    assert "runspec prepare" in hosts.remedy and "docs/site.md" in hosts.remedy
    assert missing(small_spec("small", 5, "learner.hosts=2"), tmp_path, LAPTOP) == []


def test_a_learner_whose_other_hosts_are_elsewhere_asks_for_its_share(
    full_spec: RunSpec, tmp_path: Path
) -> None:
    # given a machine with 4 of 64 chips, and learners that others start
    placement = full_spec.placement.model_copy(update={"roles": []})
    spec = full_spec.model_copy(update={"placement": placement})
    here = paths(spec, replace(LAPTOP, tpus=4), tmp_path)
    # then neither hosts nor chips are missed
    assert not {"learner.hosts", "learner.hardware"} & set(here)
    # and of 3 chips the fourth is
    found = {item.path: item for item in missing(spec, tmp_path, replace(LAPTOP, tpus=3))}
    thing = "tpu-v5p x 4 (4 TPU chips); this machine has 3"
    assert found["learner.hardware"].thing == thing
    # and where the learners are named, all are
    named = spec.model_copy(
        update={"placement": placement.model_copy(update={"roles": ["learners"]})}
    )
    some = paths(named, replace(LAPTOP, tpus=4), tmp_path)
    assert {"learner.hosts", "learner.hardware"} <= set(some)


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
    # then nothing is missing, and the run is made there
    assert missing(spec, run_dir, LAPTOP) == []
    with prepared(spec, tmp_path / "runs") as run:
        assert run.identity.root_public_key == root.public_hex


def test_a_disk_too_small_is_named_with_both_figures(tmp_path: Path) -> None:
    (item,) = missing(small_spec(), tmp_path, replace(LAPTOP, free_bytes=lambda folder: GIB // 4))
    assert item.thing == "about 0.5 GiB of disk needed, 0.2 free"


def test_what_the_torch_engine_imports_is_asked_for_where_it_is_chosen(tmp_path: Path) -> None:
    here = replace(
        LAPTOP, has_module=lambda name: name != "transformers", prefill_engines=("jax", "torch")
    )
    assert missing(small_spec(), tmp_path, here) == []
    (item,) = missing(small_spec("small", 5, "verify.engine=torch"), tmp_path, here)
    assert item.thing == "engine torch imports transformers, not installed here"


def test_what_monitors_need_is_asked_for(tmp_path: Path) -> None:
    kinds = "{name: a, kind: tensorboard}, {name: b, kind: wandb}"
    trackio = f"{{name: c, kind: trackio, python: {tmp_path / 'python'}}}"
    spec = small_spec("small", 5, f"monitors=[{kinds}, {trackio}]")
    here = replace(LAPTOP, has_module=lambda name: name != "wandb")
    found = {item.path: item for item in missing(spec, tmp_path, here)}
    assert set(found) == {"monitors.b", "monitors.c.python"}
    assert found["monitors.b"].thing == "Python package not installed here: wandb"
    assert found["monitors.b"].remedy.endswith('[wandb]"')
    assert "make trackio" in found["monitors.c.python"].remedy


def test_disk_is_reckoned_from_the_shape() -> None:
    # given hidden 64, 2 heads of 32 with 1 KV head, MLP 192, 3 layers, vocabulary 192, untied
    attention = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64
    layer = attention + 3 * 64 * 192 + 2 * 64
    parameters = 3 * layer + 2 * 192 * 64 + 64
    # then the disk holds 6 versions in 3 places of 4 bytes each with headers, 3 at the sampler
    # and 5 at the validator, who may be 2 steps behind, and 3 states of 12 bytes
    numbers = parameters * (4 * (6 * 3 + 3 + 5) + 12 * 3) + GIB // 2
    assert 0 < disk_bytes(small_spec(), model_config(small_spec())) - numbers < 26 * 5000


def test_a_model_is_found_in_a_directory_or_in_the_cache(tmp_path: Path) -> None:
    snapshot = model_in_cache(tmp_path)
    env = {"HF_HOME": str(tmp_path)}
    assert find_model("Qwen/QwQ-32B", REVISION, env) == snapshot
    assert find_model("Qwen/QwQ-32B", None, env) is None, "which commit `main` is was never asked"
    main = snapshot.parent.parent / "refs" / "main"
    main.parent.mkdir()
    main.write_text(REVISION)
    assert find_model("Qwen/QwQ-32B", None, env) == snapshot
    assert find_model(str(snapshot), None, {}) == snapshot
    assert find_model("../../etc", "passwd", env) is None


def test_only_what_is_started_here_is_asked_for(full_spec: RunSpec, tmp_path: Path) -> None:
    # given a machine that runs the learner of a run whose pools and validators are elsewhere
    placement = full_spec.placement.model_copy(update={"roles": []})
    spec = full_spec.model_copy(update={"placement": placement})
    facts = replace(LAPTOP, tpus=64, has_module=lambda name: name != "vllm", prefill_engines=())
    found = paths(spec, facts, tmp_path)
    # then it lacks neither GPUs nor vLLM nor a prefill engine, and relays may be anywhere
    for path in ("samplers.volunteers.hardware", "placement.backend", "verify.engine"):
        assert path not in found
    assert not any(path.startswith("broadcast.relays") for path in found)
    # when a relay elsewhere has no address, then nobody could find it
    relays = [relay.model_copy(update={"url": None}) for relay in spec.broadcast.relays]
    broadcast = spec.broadcast.model_copy(update={"relays": relays})
    lost = spec.model_copy(update={"broadcast": broadcast})
    assert f"broadcast.relays.{relays[0].name}.url" in paths(lost, facts, tmp_path)


def test_a_run_without_validators_would_never_fill_a_step(tmp_path: Path) -> None:
    spec = small_spec()
    spec = spec.model_copy(update={"verify": spec.verify.model_copy(update={"validators": 0})})
    (item,) = missing(spec, tmp_path, LAPTOP)
    assert item.path == "verify.validators"


def test_devices_that_are_not_there_are_named(tmp_path: Path) -> None:
    spec = small_spec("small", 5, "placement.devices={learner: [0, 3]}")
    (item,) = missing(spec, tmp_path, replace(LAPTOP, gpus=["NVIDIA L4"] * 2))
    assert (item.path, item.thing) == (
        "placement.devices.learner",
        "no device 3: this machine has 2",
    )


@pytest.mark.parametrize("folder", ["small/state", "small/islands/1/state"])
def test_a_new_run_does_not_go_on_from_the_states_of_an_earlier_namesake(
    tmp_path: Path, folder: str
) -> None:
    # given full states of a run that was deleted
    spec = small_spec("small", 5, f"checkpoints.dir={tmp_path}", "learner.islands.count=2")
    (tmp_path / folder / "step_4").mkdir(parents=True)
    run_dir = tmp_path / "runs" / "small"
    assert paths(spec, LAPTOP, run_dir) == ["checkpoints.dir"]
    # but a run that is there has them for its own
    run_dir.mkdir(parents=True)
    (run_dir / "spec.json").write_bytes(dump_resolved(spec))
    assert missing(spec, run_dir, LAPTOP) == []


def model_and_tokenizer(folder: Path, largest: int) -> tuple[Path, Path]:
    """A model of 10 rows with a tokenizer of its own, and another tokenizer."""
    model, other = folder / "model", folder / "other"
    for each, template in ((model, "old"), (other, "new")):
        each.mkdir()
        (each / "chat_template.jinja").write_text(template)
    config = json.loads((ROOT / "runspec/core/models/named/Qwen--Qwen3-4B.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"vocab_size": 10, "num_hidden_layers": 1})
    )
    (model / "model.safetensors").write_bytes(bytes(8))
    (model / "added_tokens.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    tokens = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b", "id": largest}]}
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    return model, other


def test_another_tokenizer_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    model, other = model_and_tokenizer(tmp_path, largest=9)
    spec = of_model(model, other)
    assert missing(spec, tmp_path, LAPTOP) == []
    # when the starting model is linked, twice
    initial = tmp_path / "initial"
    for _ in range(2):
        link_model(initial, model, other)
    # then its weights are the model's, tokenizer and template the other's, and no token is left
    assert (initial / "model.safetensors").resolve() == model / "model.safetensors"
    assert (initial / "tokenizer.json").resolve() == other / "tokenizer.json"
    assert (initial / "chat_template.jinja").read_text() == "new"
    assert not (initial / "added_tokens.json").exists()
    # and without another tokenizer it is the model's directory
    link_model(initial, model, None)
    assert initial.readlink() == model


def test_a_path_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    model, _ = model_and_tokenizer(tmp_path, largest=9)
    (gone,) = missing(of_model(model, tmp_path / "gone"), tmp_path, LAPTOP)
    assert (gone.path, gone.thing) == ("model.tokenizer", f"no directory {tmp_path / 'gone'}")
    (empty,) = missing(of_model(model, tmp_path), tmp_path, LAPTOP)
    assert empty.thing == f"the directory {tmp_path} has no tokenizer.json"


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    model, other = model_and_tokenizer(tmp_path, largest=10)
    (item,) = missing(of_model(model, other), tmp_path, LAPTOP)
    assert item.path == "model.tokenizer"
    assert "largest token id is 10, the model's vocabulary has 10 rows" in item.thing
    with pytest.raises(UserError, match="largest token id is 10"):
        link_model(tmp_path / "initial", model, other)


def of_model(model: Path, tokenizer: Path) -> RunSpec:
    spec = small_spec()
    words = {"hf": str(model), "shape": None, "tokenizer": Tokenizer(hf=str(tokenizer))}
    changed = {"model": spec.model.model_copy(update=words), "warm_start": None}
    return spec.model_copy(update=changed)


def test_tpu_chips_are_counted_by_their_pci_devices(tmp_path: Path) -> None:
    """v5e, v5p and v6e have no /dev/accel*."""
    devices = {"a": ("0x1ae0", "0x0062"), "b": ("0x1ae0", "0x0062"), "c": ("0x1ae0", "0x0042")}
    devices["d"] = ("0x10de", "0x0062")
    for name, (vendor, device) in devices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "device").write_text(f"{device}\n")
    assert tpu_chips(tmp_path) == 2
