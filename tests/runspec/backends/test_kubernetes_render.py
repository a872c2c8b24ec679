"""`runspec render --backend kubernetes`: the objects, which the published models take."""

from __future__ import annotations

import json
import stat
from base64 import b64decode
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from runspec.local.bundle import decode_bundle
from tests.harness import ROOT, TARGET_SHORT
from tests.runspec.cli.in_process import runspec

SPECS = ROOT / "specs"
LONG = SPECS / "target_long.yaml"
CLUSTER = ("--set", "placement.kubernetes.image=registry.example.org/runspec:1")
H200 = ("--placement", SPECS / "placements" / "h200.yaml")
CASES: dict[str, tuple[str | Path, ...]] = {
    "laptop": (TARGET_SHORT, "--profile", "laptop"),
    "tpu": (TARGET_SHORT, "--placement", SPECS / "placements" / "tpu_and_volunteers.yaml"),
    "h200": (LONG, *H200),
    "islands": (SPECS / "opendiloco.yaml", "--set", "learner.islands.count=2"),
}
Object = dict[str, Any]


def render(case: str, folder: Path, *options: str) -> list[Object]:
    words = (*CASES[case], *CLUSTER, *options, "--runs-dir", folder / "runs")
    done = runspec("render", *words, "--backend", "kubernetes", "-o", folder / "manifests")
    assert done.returncode == 0, done.stderr
    [made] = (folder / "manifests").iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    return list(yaml.safe_load_all(made.read_text()))


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def jobs(objects: list[Object]) -> dict[str, Object]:
    """The jobs of the only JobSet, by role group."""
    [jobset] = of_kind(objects, "JobSet").values()
    return {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}


def pod(job: Object) -> Object:
    spec: Object = job["template"]["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module", params=CASES)
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param, render(request.param, tmp_path_factory.mktemp("site"))


def test_published_models_take_every_object(rendered: tuple[str, list[Object]]) -> None:
    _, objects = rendered
    for made in objects:
        if made["kind"] == "JobSet":
            # Unknown fields would be dropped.
            read = JobsetV1alpha2JobSet.from_dict(made)
            assert read is not None and read.to_dict() == made
            for name, job in jobs(objects).items():
                whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
                kubernetes_validate.validate(whole | job["template"], "1.37", strict=True)
        else:
            kubernetes_validate.validate(made, "1.37", strict=True)


def test_what_a_pod_mounts_is_made_and_holds_its_bundle(
    rendered: tuple[str, list[Object]],
) -> None:
    case, objects = rendered
    secrets, claims = of_kind(objects, "Secret"), of_kind(objects, "PersistentVolumeClaim")
    signers = {"trunk": {"coordinator", "publisher"}, "learners": set(), "island-1": {"island-1"}}
    signers["trunk"] |= {"island-0"} if case == "islands" else set()
    for name, job in jobs(objects).items():
        volumes = {volume["name"]: volume for volume in pod(job)["volumes"]}
        data = secrets[volumes["bundles"]["secret"]["secretName"]]["data"]
        # then each pod finds one bundle by its index, and nobody has a key of another group
        assert set(data) == {f"{i}.json" for i in range(job["template"]["spec"]["completions"])}
        for text in data.values():
            bundle = decode_bundle(b64decode(text), place=name)
            relay: set[str] = set()
            own = relay if name.startswith("relay-") else set(bundle.roles)
            assert set(bundle.keys) == signers.get(name, own)
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_the_root_key_is_in_no_object(tmp_path: Path) -> None:
    objects = render("laptop", tmp_path)
    [root] = tmp_path.glob("runs/*/site/keys/root.key")
    secret = json.dumps(root.read_text().strip())[1:-1]
    assert not any(
        secret.encode() in b64decode(text)
        for made in of_kind(objects, "Secret").values()
        for text in made["data"].values()
    )
    assert secret not in json.dumps(objects)


def test_rendering_again_keeps_the_keys(tmp_path: Path) -> None:
    first = of_kind(render("laptop", tmp_path), "Secret")
    again = of_kind(render("laptop", tmp_path), "Secret")
    assert first == again


def test_a_slice_is_the_trunk_and_the_learners_beside_it(tmp_path: Path) -> None:
    # given 128 chips on 32 hosts
    made = jobs(render("tpu", tmp_path))
    trunk, learners = pod(made["trunk"]), pod(made["learners"])
    assert made["learners"]["template"]["spec"]["completions"] == 31
    for each in (trunk, learners):
        assert each["containers"][0]["resources"] == {"limits": {"google.com/tpu": "4"}}
        assert each["nodeSelector"] == {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
            "cloud.google.com/gke-tpu-topology": "4x4x8",
        }
        # then each knows all hosts of the slice, itself by the name that JobSet gives it
        env = {
            each["name"]: each["value"] for each in each["containers"][0]["env"] if "value" in each
        }
        hosts = env["TPU_WORKER_HOSTNAMES"].split(",")
        assert len(hosts) == 32 and hosts[0].startswith("target-short-trunk-0-0.")
        assert hosts[31] == "target-short-learners-0-30.target-short"
    [beside] = learners["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert beside["labelSelector"]["matchLabels"]["runspec.dev/group"] == "trunk"


def test_an_island_is_a_pod_of_its_learner_and_the_server_of_its_shares(tmp_path: Path) -> None:
    objects = render("islands", tmp_path)
    # given two islands of one GPU: the trunk, and a pod with two containers
    assert list(jobs(objects)) == ["trunk", "island-1"]
    island = pod(jobs(objects)["island-1"])
    role, server = island["containers"]
    assert role["resources"]["limits"] == {"nvidia.com/gpu": "1"} and "resources" not in server
    assert server["volumeMounts"] == role["volumeMounts"]
    # then they have one bundle and one folder
    assert role["command"][:2] == ["runspec", "role"]
    assert server["command"][2:] == ["shares-1", *role["command"][2:], "--listen", "0.0.0.0:29403"]
    # and the others reach the server under the address that the spec gives
    service = of_kind(objects, "Service")["opendiloco-shares-1"]["spec"]
    assert service["selector"]["runspec.dev/group"] == "island-1"
    assert service["ports"][0]["port"] == 29403
    spec = json.loads(of_kind(objects, "ConfigMap")["opendiloco-spec"]["data"]["spec.json"])
    first, second = spec["learner"]["islands"]["members"]
    assert (first["url"], second["url"]) == (None, "http://opendiloco-shares-1:29403")
    # the trunk's is a server of the trunk's pod
    ports = pod(jobs(objects)["trunk"])["containers"][0]["ports"]
    assert {port["containerPort"] for port in ports} == {29400, 29401, 29402}


def test_figures_have_a_port_of_the_pod_that_prometheus_finds(tmp_path: Path) -> None:
    objects = render("laptop", tmp_path, "--set", "placement.metrics={}")
    ports = {
        name: [each["containerPort"] for each in pod(job)["containers"][0]["ports"]]
        for name, job in jobs(objects).items()
    }
    assert ports.pop("trunk") == [29400, 29401, 29500, 29501]
    assert ports.pop("relay-local") == [29402]
    assert set(map(tuple, ports.values())) == {(29500,)} and len(ports) == 3
    spec = json.loads(of_kind(objects, "ConfigMap")["target-short-spec"]["data"]["spec.json"])
    assert spec["placement"]["metrics"] == {"host": "0.0.0.0", "base_port": 29500}


def test_only_full_states_of_several_hosts_need_a_shared_volume(tmp_path: Path) -> None:
    for case, options, modes in (
        ("laptop", (), ["ReadWriteOnce"]),
        ("tpu", (), ["ReadWriteOnce", "ReadWriteMany"]),
        ("tpu", ("--set", "checkpoints.dir=gs://bucket/run"), ["ReadWriteOnce"]),
    ):
        folder = tmp_path / f"{case}-{len(options)}"
        claims = of_kind(render(case, folder, *options), "PersistentVolumeClaim")
        assert [claim["spec"]["accessModes"][0] for claim in claims.values()] == modes


def test_a_site_says_images_nodes_queue_and_models(tmp_path: Path) -> None:
    values = (
        *("images.volunteers=sampler:1", "queue=team", "models=weights", "storage_class=fast"),
        *("node_selectors.volunteers.gpu=h200", "namespace=rl"),
    )
    options = [word for value in values for word in ("--set", f"placement.kubernetes.{value}")]
    objects = render("h200", tmp_path, *options)
    [jobset] = of_kind(objects, "JobSet").values()
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert {each["metadata"]["namespace"] for each in objects} == {"rl"}
    made = {name: pod(job) for name, job in jobs(objects).items()}
    sampler = made["volunteers"]["containers"][0]
    assert (sampler["image"], made["volunteers"]["nodeSelector"]) == ("sampler:1", {"gpu": "h200"})
    assert sampler["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert {"name": "HF_HOME", "value": "/models"} in made["trunk"]["containers"][0]["env"]
    claim = of_kind(objects, "PersistentVolumeClaim")["target-long-run"]
    assert claim["spec"]["storageClassName"] == "fast"


def test_roles_that_the_spec_leaves_to_others_are_not_rendered(tmp_path: Path) -> None:
    made = jobs(render("laptop", tmp_path, "--set", "placement.roles=[validators]"))
    assert list(made) == ["trunk", "validators"]


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("laptop", ("placement.kubernetes=null",), "no cluster is described"),
        ("laptop", ("name=1st",), "'1st' cannot name anything on Kubernetes"),
        ("laptop", (f"name={'long' * 15}",), "DNS allows 63"),
        (
            "h200",
            ("learner.mesh.slices=2", "learner.mesh.slice_axis=fsdp"),
            "places a learner on one",
        ),
        (
            "islands",
            (
                "learner.islands={count: null, members: [{name: a}, {name: b, hosts: 2,"
                " mesh: {fsdp: 2}, hardware: {kind: h100-80g, count: 2}}]}",
                "checkpoints.dir=s3://bucket/states",
            ),
            "places an island on one",
        ),
    ],
)
def test_what_cannot_run_there_is_said_and_nothing_written(
    case: str, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    changes = [word for value in options for word in ("--set", value)]
    words = (*CASES[case], *CLUSTER, *changes, "--runs-dir", tmp_path / "runs")
    done = runspec("render", *words, "--backend", "kubernetes", "-o", tmp_path / "out")
    assert done.returncode == 1 and message in done.stderr and "remedy" in done.stderr
    assert not list(tmp_path.iterdir())
