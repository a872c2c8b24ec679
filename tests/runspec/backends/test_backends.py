"""Kubernetes: the objects, which the published models take and which, executed, are a run, and the
commands, against a small fake API server. Ray: what it is asked for, and which node has the trunk.
Slurm: an sbatch script, run with stand-ins for Slurm and Ray."""

import json
import shlex
import socket
import stat
import subprocess
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from runspec.backends.ray.cluster import (
    choose_trunk,
    connect,
    demands,
    find_keeper,
    line_of,
    options,
)
from runspec.core.errors import UserError
from runspec.local.machine import TPU_HOSTS
from runspec.local.run_view import look_at
from runspec.local.site import SHARED, decode_bundle, groups_of
from tests.harness import ROOT, TARGET_SHORT
from tests.runspec.backends.fake_api_server import FakeApiServer, cluster, fake_api_server
from tests.runspec.backends.fake_kubelet import FakeKubelet, on_cluster
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_run import small_spec

pytestmark = pytest.mark.slow

SPECS = ROOT / "specs"
PLACEMENTS = SPECS / "placements"
LAPTOP = (TARGET_SHORT, "--profile", "laptop")
H200 = (SPECS / "target_long.yaml", "--placement", PLACEMENTS / "h200.yaml")
CASES: dict[str, tuple[str | Path, ...]] = {
    "laptop": LAPTOP,
    "tpu": (TARGET_SHORT, "--placement", PLACEMENTS / "tpu_and_volunteers.yaml"),
    "h200": H200,
    "islands": (SPECS / "opendiloco.yaml", "--set", "learner.islands.count=2"),
}
Object = dict[str, Any]
Render = Callable[..., list[Object]]


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def command(case: str, folder: Path, *values: str) -> CompletedProcess[str]:
    image = "placement.kubernetes.image=registry.example.org/runspec:1"
    words = (*CASES[case], *sets(image, *values), "--runs-dir", folder / "runs")
    return runspec("render", *words, "--backend", "kubernetes", "-o", folder / "manifests")


@pytest.fixture(scope="module")
def render(tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Renders a case, each time it is asked for under the same folder of runs."""
    folders: dict[str, Path] = {}

    def once(case: str, *values: str) -> list[Object]:
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp(case)
        folder = folders[case]
        done = command(case, folder, *values)
        assert done.returncode == 0, done.stderr
        [made] = (folder / "manifests").iterdir()
        assert stat.S_IMODE(made.stat().st_mode) == 0o600
        objects = list(yaml.safe_load_all(made.read_text()))
        made.unlink()
        # and the root key is in no object
        [root] = folder.glob("runs/*/site/keys/root.key")
        secret = json.dumps(root.read_text().strip())[1:-1]
        for each in of_kind(objects, "Secret").values():
            assert not any(secret.encode() in b64decode(text) for text in each["data"].values())
        assert secret not in json.dumps(objects)
        return objects

    return once


@pytest.fixture(scope="module")
def plain(render: Render) -> dict[str, list[Object]]:
    """The objects of each case."""
    return {case: render(case) for case in CASES}


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def jobs(objects: list[Object]) -> dict[str, Object]:
    """The jobs of the only JobSet, by role group."""
    [jobset] = of_kind(objects, "JobSet").values()
    return {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}


def pods(objects: list[Object]) -> dict[str, Object]:
    return {
        name: job["template"]["spec"]["template"]["spec"] for name, job in jobs(objects).items()
    }


def spec_in(objects: list[Object], name: str) -> Object:
    made: Object = json.loads(of_kind(objects, "ConfigMap")[name]["data"]["spec.json"])
    return made


def ports_of(objects: list[Object]) -> dict[str, list[int]]:
    return {
        name: [each["containerPort"] for each in pod["containers"][0].get("ports", ())]
        for name, pod in pods(objects).items()
    }


@pytest.mark.parametrize("case", CASES)
def test_published_models_take_every_object(plain, case):
    for made in plain[case]:
        if made["kind"] == "JobSet":
            # Unknown fields would be dropped.
            read = JobsetV1alpha2JobSet.from_dict(made)
            assert read is not None and read.to_dict() == made
            for name, job in jobs(plain[case]).items():
                whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
                kubernetes_validate.validate(whole | job["template"], "1.37", strict=True)
        else:
            kubernetes_validate.validate(made, "1.37", strict=True)


@pytest.mark.parametrize("case", CASES)
def test_what_a_pod_mounts_is_made_and_holds_its_bundle(plain, case, tmp_path):
    objects = plain[case]
    secrets, claims = of_kind(objects, "Secret"), of_kind(objects, "PersistentVolumeClaim")
    signers = {"trunk": {"coordinator", "publisher"}, "learners": set(), "island-1": {"island-1"}}
    signers["trunk"] |= {"island-0"} if case == "islands" else set()
    for name, job in jobs(objects).items():
        volumes = {volume["name"]: volume for volume in pods(objects)[name]["volumes"]}
        data = secrets[volumes["bundles"]["secret"]["secretName"]]["data"]
        run = of_kind(objects, "ConfigMap")[volumes["site"]["configMap"]["name"]]["data"]
        for file, text in run.items():
            (tmp_path / SHARED).mkdir(exist_ok=True)
            (tmp_path / SHARED / file).write_text(text)
        # then each pod finds one bundle by its index, and nobody has a key of another group
        assert set(data) == {f"{i}.json" for i in range(job["template"]["spec"]["completions"])}
        for text in data.values():
            assert name == "trunk" or len(text) < 1000  # so that a Secret holds a thousand
            bundle = decode_bundle(b64decode(text), place=name, folder=tmp_path)
            own: set[str] = set() if name.startswith("relay-") else set(bundle.roles)
            assert set(bundle.keys) == signers.get(name, own)
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims


@pytest.mark.parametrize("case", CASES)
def test_a_pod_has_no_token_of_the_cluster_and_few_capabilities(plain, case):
    sandboxes = {"CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID"}
    for pod in pods(plain[case]).values():
        assert pod["automountServiceAccountToken"] is False
        tpu = "cloud.google.com/gke-tpu-accelerator" in pod.get("nodeSelector", {})
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            locks_memory = {"SYS_RESOURCE"} if tpu else set()  # the TPU's driver
            assert {*security["capabilities"]["add"]} == sandboxes | locks_memory


def test_a_slice_is_the_trunk_and_the_learners_beside_it(plain, tmp_path):
    # given 128 chips on 32 hosts
    made = pods(plain["tpu"])
    assert jobs(plain["tpu"])["learners"]["template"]["spec"]["completions"] == 31
    for each in (made["trunk"], made["learners"]):
        assert each["containers"][0]["resources"]["limits"] == {"google.com/tpu": "4"}
        assert each["nodeSelector"] == {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
            "cloud.google.com/gke-tpu-topology": "4x4x8",
        }
        # then each knows all hosts of the slice, itself by the name that JobSet gives it
        env = {entry["name"]: entry.get("value", "") for entry in each["containers"][0]["env"]}
        hosts = env[TPU_HOSTS].split(",")
        assert len(hosts) == 32 and hosts[0].startswith("target-short-trunk-0-0.")
        assert hosts[31] == "target-short-learners-0-30.target-short"
    # and needs to, because GKE calls the second host the first one
    kubelet = FakeKubelet(plain["tpu"], tmp_path)
    first = kubelet.pod("learners", 0)
    env = kubelet.environment(first)
    assert env["TPU_WORKER_ID"] == "0" and env[TPU_HOSTS].split(",").index(first.host) == 1
    beside = made["learners"]["affinity"]["podAffinity"]
    [beside] = beside["requiredDuringSchedulingIgnoredDuringExecution"]
    assert beside["labelSelector"]["matchLabels"]["runspec.dev/group"] == "trunk"


def test_an_island_is_a_pod_of_its_learner_and_the_server_of_its_shares(plain):
    objects = plain["islands"]
    # given two islands of one GPU: the trunk, and a pod with two containers
    assert list(jobs(objects)) == ["trunk", "island-1"]
    role, server = pods(objects)["island-1"]["containers"]
    assert role["resources"]["limits"] == {"nvidia.com/gpu": "1"} and "resources" not in server
    assert server["volumeMounts"] == role["volumeMounts"]
    # then they have one bundle and one folder
    assert role["command"][:2] == ["runspec", "role"]
    assert server["command"][2:] == ["shares-1", *role["command"][2:], "--listen", "0.0.0.0:29403"]
    # and the others reach the server under the address that the spec gives
    service = of_kind(objects, "Service")["opendiloco-shares-1"]["spec"]
    assert service["selector"]["runspec.dev/group"] == "island-1"
    assert service["ports"][0]["port"] == 29403
    first, second = spec_in(objects, "opendiloco-spec")["learner"]["islands"]["members"]
    assert (first["url"], second["url"]) == (None, "http://opendiloco-shares-1:29403")
    # the trunk's is a server of the trunk's pod
    assert set(ports_of(objects)["trunk"]) == {29400, 29401, 29402}


def test_figures_have_a_port_of_the_pod_that_prometheus_finds(render):
    objects = render("laptop", "placement.metrics={}")
    ports = ports_of(objects)
    assert ports.pop("trunk") == [29400, 29401, 29500, 29501]
    assert ports.pop("relay-local") == [29402]
    assert list(ports.values()) == [[29500]] * 3
    placement = spec_in(objects, "target-short-spec")["placement"]
    assert placement["metrics"] == {"host": "0.0.0.0", "base_port": 29500}


def test_only_full_states_of_several_hosts_need_a_shared_volume(plain, render):
    for objects, modes in (
        (plain["laptop"], ["ReadWriteOnce"]),
        (plain["tpu"], ["ReadWriteOnce", "ReadWriteMany"]),
        (render("tpu", "checkpoints.dir=gs://bucket/run"), ["ReadWriteOnce"]),
    ):
        claims = of_kind(objects, "PersistentVolumeClaim").values()
        assert [claim["spec"]["accessModes"][0] for claim in claims] == modes


def test_a_site_says_images_nodes_queue_models_and_roles(render):
    values = (
        *("images.volunteers=sampler:1", "queue=team", "models=weights", "storage_class=fast"),
        *("node_selectors.volunteers.gpu=h200", "namespace=rl"),
    )
    objects = render("h200", *(f"placement.kubernetes.{value}" for value in values))
    [jobset] = of_kind(objects, "JobSet").values()
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert {each["metadata"]["namespace"] for each in objects} == {"rl"}
    made = pods(objects)
    sampler = made["volunteers"]["containers"][0]
    assert (sampler["image"], made["volunteers"]["nodeSelector"]) == ("sampler:1", {"gpu": "h200"})
    versions = 3 * 65_527_841_528 + 2**29
    requests = {"ephemeral-storage": str(versions)}
    assert sampler["resources"] == {"limits": {"nvidia.com/gpu": "2"}, "requests": requests}
    assert {"name": "HF_HOME", "value": "/models"} in made["trunk"]["containers"][0]["env"]
    claim = of_kind(objects, "PersistentVolumeClaim")["target-long-run"]
    assert claim["spec"]["storageClassName"] == "fast"
    # and roles that the spec leaves to others are not rendered
    assert list(jobs(render("laptop", "placement.roles=[validators]"))) == ["trunk", "validators"]


ONE_OF_TWO = "{name: b, hosts: 2, mesh: {fsdp: 2}, hardware: {kind: h100-80g, count: 2}}"
OTHER_HOSTS = f"learner.islands={{count: null, members: [{{name: a}}, {ONE_OF_TWO}]}}"


@pytest.mark.parametrize(
    ("case", "values", "message"),
    [
        ("laptop", ["placement.kubernetes=null"], "no cluster is described"),
        ("laptop", ["name=1st"], "'1st' cannot name anything on Kubernetes"),
        ("laptop", [f"name={'long' * 15}"], "DNS allows 63"),
        (
            "h200",
            ["learner.mesh.slices=2", "learner.mesh.slice_axis=fsdp"],
            "places a learner on one",
        ),
        ("islands", [OTHER_HOSTS, "checkpoints.dir=s3://bucket/states"], "places an island on one"),
    ],
)
def test_what_cannot_run_there_is_said_and_nothing_written(case, values, message, tmp_path):
    done = command(case, tmp_path, *values)
    assert done.returncode == 1 and message in done.stderr and "remedy" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_the_rendered_objects_are_a_run_that_finishes(tmp_path):
    # given a run of one step, with nothing but what the rendered objects say
    with on_cluster(tmp_path, {"steps": 1, "warm_start.max_updates": 20}) as kubelet:
        trunk, others = kubelet.pod("trunk"), [pod for pod in kubelet.pods if pod.group != "trunk"]
        looked: dict[str, str] = {}
        for _ in kubelet.steps(1200):
            if len(looked) < len(others) and all(pod.process for pod in others):
                # then status is there where the run directory is, and that is in no other pod
                words = ("target-short", "--json", "--runs-dir", "/data/runs")
                status = kubelet.execute(trunk, "runspec", "status", *words)
                assert json.loads(status.stdout)["name"] == "target-short", status.stderr
                for pod in others:
                    looked[pod.group] = kubelet.execute(pod, "ls", "/data/runs", "/data").stdout
        # and whoever has work ends by itself once the run is finished
        assert trunk.exits == [0]
        assert {pod.group: pod.exits for pod in others if pod.exits != [0]} == {"relay-local": []}
        assert looked.keys() == {"relay-local", "validators", "volunteers"}
        assert not any("checkpoints" in found or "ledger" in found for found in looked.values())
    run = look_at(tmp_path / "kubelet" / "claims" / "target-short-run" / "runs" / "target-short")
    assert (run.state, run.trained) == ("finished", 1)


# The client leaves the socket of an exec that the server has ended to the collector.
unclosed = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
TRUNK = "target-short-trunk-0-0-abcde"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    with fake_api_server() as made:
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig(tmp_path / "kubeconfig")))
        yield made


def apply(folder: Path, *values: str) -> CompletedProcess[str]:
    cluster = ("backend=kubernetes", "kubernetes.image=runspec:test", "kubernetes.namespace=rl")
    words = sets(*(f"placement.{value}" for value in cluster), *values)
    return runspec("apply", *CASES["laptop"], *words, "--runs-dir", folder / "runs")


def on(folder: Path, command: str, *words: str) -> CompletedProcess[str]:
    return runspec(command, "target-short", *words, "--runs-dir", folder / "runs")


@unclosed
def test_a_run_is_applied_watched_paused_resumed_and_deleted(server, tmp_path):
    # when a run is applied, then the cluster has its objects
    done = apply(tmp_path)
    assert done.returncode == 0, done.stderr
    kinds = {"ConfigMap", "JobSet", "PersistentVolumeClaim", "Secret", "Service"}
    assert server.kinds() == kinds
    # and status is what the trunk's pod says, with its exit code
    server.exit_code = 3
    status = on(tmp_path, "status", "--json")
    own = f"--runs-dir {tmp_path / 'runs'}"
    said = f"runspec status target-short --json {own} {own} --runs-dir /data/runs"
    assert (status.returncode, status.stdout) == (3, f"ran {said}\n")
    assert "a warning" in status.stderr
    assert server.executed == [(TRUNK, said.split())]
    server.exit_code = 0
    # and logs are the trunk's, or of another role's pod
    assert "ran runspec logs" in on(tmp_path, "logs").stdout
    own = on(tmp_path, "logs", "--role", "volunteers-0", "--tail", "2").stdout.splitlines()
    assert own == [f"target-short-volunteers-0-0-abcde line {i}" for i in (3, 4)]
    # and a pause ends the pods, but not the run
    assert on(tmp_path, "pause").returncode == 0
    assert server.jobset()["spec"]["suspend"] is True
    assert "paused" in on(tmp_path, "status").stdout
    assert on(tmp_path, "resume").returncode == 0
    assert server.jobset()["spec"]["suspend"] is False
    # and applied again after a pause it goes on, and keeps its keys
    before = dict(server.objects)
    assert on(tmp_path, "pause").returncode == 0
    assert apply(tmp_path).returncode == 0
    assert server.jobset()["spec"]["suspend"] is False
    for path, made in before.items():
        assert made["kind"] != "Secret" or server.objects[path] == made
    # and deleted nothing of it is left, there or here; another run stays
    assert apply(tmp_path, "name=other").returncode == 0
    assert on(tmp_path, "delete", "--yes").returncode == 0
    labels = [each["metadata"]["labels"] for each in server.objects.values()]
    assert {of["runspec.dev/run"] for of in labels} == {"other"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]


@unclosed
def test_apply_goes_on_after_a_failure(server, tmp_path):
    # given a JobSet that starts no pod any more
    assert apply(tmp_path).returncode == 0
    failed = {"type": "Failed", "status": "True", "message": "the trunk ended with 4"}
    server.jobset()["status"] = {"conditions": [failed]}
    server.jobset()["spec"]["replicatedJobs"] = []
    assert "Failed: the trunk ended with 4" in on(tmp_path, "status").stdout
    # then it is made anew
    assert apply(tmp_path).returncode == 0
    assert "status" not in server.jobset() and server.jobset()["spec"]["replicatedJobs"]


@unclosed
def test_secrets_are_taken_from_the_environment(server, tmp_path, monkeypatch):
    secret = "secrets=[{name: TOKEN, from: {env: MY_TOKEN}}]"
    done = apply(tmp_path, secret)
    assert done.returncode == 1 and "the environment has no MY_TOKEN" in done.stderr
    assert not server.objects
    monkeypatch.setenv("MY_TOKEN", "of-mine")
    assert apply(tmp_path, secret).returncode == 0
    made = server.objects["/api/v1/namespaces/rl/secrets/target-short-env"]
    assert b64decode(made["data"]["MY_TOKEN"]) == b"of-mine"


@unclosed
def test_what_the_cluster_lacks_or_refuses_is_said(server, tmp_path, monkeypatch):
    def fails(message: str, *words: str) -> None:
        done = on(tmp_path, *words)
        assert done.returncode == 1 and message in done.stderr

    assert apply(tmp_path).returncode == 0
    server.refusal = "pods is forbidden"
    for words in (["status"], ["logs"], ["pause"], ["resume"], ["delete", "--yes"]):
        fails("the cluster refuses: pods is forbidden", *words)
        assert (tmp_path / "runs" / "target-short" / "site.json").exists()
    server.refusal = None
    fails("no pod of role 'volunteers-9'", "logs", "--role", "volunteers-9")
    server.objects.clear()
    fails("the cluster has no such run", "status")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "gone"))
    fails("no cluster is configured", "status")


GPUS = small_spec(
    *("small", 5, "learner.hardware={kind: h100-80g, count: 8}", "learner.hosts=2"),
    *("learner.mesh.fsdp=8", "learner.packing.rows=8", "checkpoints.dir=s3://bucket/runs"),
    *("verify.hardware={kind: h100-80g, count: 2}", "placement.resources={trunk: {disk: 1}}"),
)


def fake_ray(*nodes: dict[str, Any], actors: tuple[str, ...] = ()) -> SimpleNamespace:
    """What `ray.nodes` and `list_named_actors` would say."""
    named = [{"name": name, "namespace": "runspec"} for name in actors]
    util = SimpleNamespace(list_named_actors=lambda all_namespaces: named)
    return SimpleNamespace(nodes=lambda: nodes, util=util)


def node(ip: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeManagerAddress": ip, "Alive": alive, "Resources": resources, "Labels": {}}


def test_each_host_asks_for_its_share_of_accelerators_by_rays_own_names():
    asked = {group.name: demands(GPUS, group) for group in groups_of(GPUS)}
    wanted = {"trunk": {"disk": 1, "GPU": 4}, "learners": {"GPU": 4}, "validators": {"GPU": 2}}
    assert {name: asked[name] for name in (*wanted, "relay-local")} == {**wanted, "relay-local": {}}
    wanted = {"num_cpus": 0, "num_gpus": 4, "resources": {"disk": 1}}
    assert options(asked["trunk"]) == wanted


def test_the_trunk_lies_on_the_first_node_that_is_alive_and_has_what_it_asks_for():
    lacks, dead = node("10.0.0.1", GPU=8), node("10.0.0.2", alive=False, GPU=8, disk=1)
    good = [node(f"10.0.0.{last}", GPU=8, disk=1) for last in (4, 3)]
    assert choose_trunk(fake_ray(lacks, dead, *good), GPUS) == "10.0.0.3"
    with pytest.raises(UserError, match="no node of the cluster has 1 disk, 4 GPU"):
        choose_trunk(fake_ray(lacks, dead), GPUS)


def test_the_node_of_a_run_is_known_by_its_keeper():
    ray = fake_ray(actors=("other@10.0.0.1", "small@10.0.0.2"))
    assert find_keeper(ray, "small") == "10.0.0.2"
    assert find_keeper(ray, "smaller") is None


def test_where_no_cluster_answers_is_said_at_once():
    with socket.socket() as silent:  # bound, but nobody listens
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match=f"nobody listens at {address}"):
            connect(f"ray://{address}")
    with pytest.raises(UserError, match=r"placement\.address ray://host:port"):
        connect("ray://host:port")


def test_a_node_without_the_package_is_said_in_a_line():
    # given how Ray 2.60 tells of it
    told = RuntimeError(
        "The actor died because of an error raised in its creation task, ray::Keeper.__init__()\n"
        "RuntimeError: The actor with name Keeper failed to import on the worker.\n"
        "ModuleNotFoundError: No module named 'runspec'"
    )
    assert line_of(told).startswith("the package runspec-rl is not installed on that node: pip")


STAND_INS = {
    "scontrol": "echo node1; echo node2",
    "srun": 'shift; exec "$@"',
    "ray": 'echo "$@"; while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
    "runspec": 'printf "%s\\n" "$@"',
}
"""Commands of a cluster, which say what they are called with."""
RAY_STOP_S = 16 + 5
"""That `ray stop` gives processes to end, and then to be killed."""


def rendered(folder: Path, *words: str | Path) -> str:
    script = folder / "run.sbatch"
    done = runspec("render", *words, "--backend", "slurm", "-o", script)
    assert done.returncode == 0, done.stderr
    return script.read_text()


def job(folder: Path, script: str, **stand_ins: str) -> subprocess.Popen[str]:
    """The script, begun as Slurm runs it."""
    env = cluster(folder, STAND_INS | stand_ins)
    return subprocess.Popen(["bash", "-c", script], env=env, stdout=subprocess.PIPE, text=True)


def test_the_script_starts_ray_on_the_allocation_and_applies_the_spec(tmp_path):
    # given options that a shell would take apart
    words = (*LAPTOP, "--set", "reward.length.targets=[8, 16]")
    script = rendered(tmp_path, *words)
    # when Slurm runs it
    running = job(tmp_path, script)
    ray, *applied = running.communicate()[0].splitlines()
    assert running.returncode == 0
    # then Ray has both nodes, and the spec is applied with the same options
    assert ray.startswith("symmetric-run --address node1:6379 --min-nodes 2 -- runspec apply")
    wanted = ["apply", *map(str, words), "--set", "placement.backend=ray"]
    assert applied == wanted and len(shlex.split(script)) > len(wanted)
    # and where `srun --wait` would kill a task, which fails the job of a finished run, Ray has the
    # time to miss its first node and to stop, but not while that node still stops
    srun = 'echo "${1#--wait=} $RAY_gcs_rpc_server_reconnect_timeout_s"'
    kills, misses = map(int, job(tmp_path, script, srun=srun).communicate()[0].split())
    assert RAY_STOP_S < misses < kills - RAY_STOP_S


def test_the_run_is_paused_before_its_time_is_up(tmp_path):
    # given an apply that goes on until somebody pauses the run
    script = rendered(tmp_path, *LAPTOP, "--runs-dir", tmp_path)
    waits = "until [ -e paused ]; do sleep 0.1; done"
    apply = f'if [ "$1" = pause ]; then touch paused; else {waits}; fi'
    running = job(tmp_path, script, runspec=f"echo $1 $2; cd {tmp_path}; {apply}")
    assert running.stdout is not None
    assert running.stdout.readline().startswith("symmetric-run")
    assert running.stdout.readline().startswith("apply")
    # when Slurm warns the script, then the run is paused, and the job ends well
    running.terminate()
    out, _ = running.communicate()
    assert (running.returncode, out) == (0, f"pause {tmp_path / 'target-short'}\n")


def test_it_asks_for_the_nodes_that_the_hardware_fills(tmp_path):
    def asked(*words: str | Path) -> dict[str, str]:
        lines = [each for each in rendered(tmp_path, *words).splitlines() if "#SBATCH --" in each]
        return {name: value for name, _, value in (line[10:].partition("=") for line in lines)}

    # 8 hosts of 8 for the learner; 32 samplers and 8 validators of 2, of which a node takes 4
    found = asked(*H200)
    assert (found["nodes"], found["gpus-per-node"]) == ("18", "8")
    assert found["signal"] == "B:TERM@300" and "requeue" in found
    # eight islands of a GPU each, and two of two hosts with four, of which a node has one
    islands = SPECS / "opendiloco.yaml"
    found = asked(islands)
    assert (found["nodes"], found["gpus-per-node"]) == ("8", "1")
    two = sets("learner.islands.count=2", "learner.hardware.count=8", "learner.hosts=2")
    one_place = sets(
        "learner.mesh.fsdp=8",
        "learner.packing.rows=8",
        "checkpoints.dir=/shared/states",
        "storage.shared=true",
    )
    found = asked(islands, *two, *one_place)
    assert (found["nodes"], found["gpus-per-node"]) == ("4", "4")
    # CPUs need no more than the learner's hosts
    found = asked(*LAPTOP)
    assert found["nodes"] == "1" and "gpus-per-node" not in found


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((TARGET_SHORT,), 1, "which Slurm does not allocate"),
        (
            (*H200, "--set", "learner.hosts=64"),
            1,
            "needs 2 devices on a node, the learner's have 1",
        ),
        (LAPTOP, 2, "say where to with -o"),
    ],
)
def test_what_no_allocation_fits_is_said(words, code, message, tmp_path):
    where = ("-o", tmp_path / "run.sbatch") if code == 1 else ()
    done = runspec("render", *words, "--backend", "slurm", *where)
    assert done.returncode == code and message in done.stderr
    assert not list(tmp_path.iterdir())
