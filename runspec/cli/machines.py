"""Runs on several machines: `runspec prepare` and `role` on a site's own, `join` on another's."""

from __future__ import annotations

import os
import shlex
import time
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import typer

from runspec import cli
from runspec.cli.apply import carry_out_or_explain
from runspec.cli.checks import sound_spec
from runspec.core.address import JoinLink, is_loopback, parse_join_link, reachable
from runspec.core.canonical import parse_object
from runspec.core.entry_points import install_command
from runspec.core.errors import UserError, one_line, per_second, reported
from runspec.core.files import require_writable, write_atomic
from runspec.core.http_client import NoAnswer, fetch_now
from runspec.core.models.family import model_config
from runspec.core.process import Endpoints, address
from runspec.core.schema import SamplerPool
from runspec.core.schema.load import FILE_NAME as SPEC_FILE
from runspec.core.schema.load import dump_resolved
from runspec.core.schema.role_names import trunk_names
from runspec.core.signed import SigningKey
from runspec.local.backend import LOCAL, StopSignals, pinned
from runspec.local.endpoints import fixed_endpoints
from runspec.local.machine import look, module_is_installed, this_machine
from runspec.local.planning import make_plan
from runspec.local.preflight import ROLE_MODULES
from runspec.local.prepare import link_starting_model, write_targets
from runspec.local.processes import role_specs
from runspec.local.run_dir import hold, own_folder, run_directory
from runspec.local.site import (
    BUNDLES,
    TRUNK_GROUP,
    Disk,
    groups_of,
    install,
    install_role,
    load_bundle,
    make_site,
    require_own,
)
from runspec.local.volunteer import LEAVE_S, Worker, choose_pool, divided, lacks, open_pools, served


def prepare_command(
    file: cli.File,
    site: Annotated[Path, typer.Option("-o", "--out", metavar="SITE", help="Folder to make.")],
    profile: cli.Profile = None,
    placement: cli.Placement = None,
    overrides: cli.Overrides = None,
) -> int:
    """Makes a site's keys, spec and bundles in a folder; returns the exit code.

    Made again with the same folder, it keeps the keys, so that a changed spec reaches the roles by
    new bundles.
    """
    files = cli.files_named(file, profile, placement, overrides)
    spec, _ = make_site(sound_spec(files, pins_root=True), site)
    print(f"{spec.name} is prepared in {site}. Bring each machine its bundles, and run there:")
    for group in groups_of(spec):
        many = f"{len(group.members)} processes, each " if len(group.members) > 1 else ""
        again = f"after an error it starts again {group.restart}"
        print(f"{group.name}: {many}on {group.machine}; keeps its {group.disk}; {again}")
        folder = run_directory(spec, None) if group.disk is Disk.RUN else None
        for member in (*group.members, *group.beside):
            print(f"  {shlex.join(group.command(member, site / BUNDLES, folder))}")
    if is_loopback(spec.placement.host):
        print(
            f"The trunk's servers are at {spec.placement.host}: only its own machine reaches them. "
            "Name its address with placement.host."
        )
    print(f"{site / 'keys'} stays here: whoever has the root key can make new roles.")
    return 0


def role_command(
    bundle: Annotated[Path, typer.Option("--bundle", metavar="FILE", help="What it may know.")],
    name: Annotated[
        str | None,
        typer.Argument(
            help="A process, or trunk: what shares the run directory.", show_default="the bundle's"
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Its own.", show_default="in storage.scratch; the run directory"
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="Of a server behind a proxy."),
    ] = None,
) -> int:
    """Runs a role; returns the trunk's exit code, and never for another role, which it becomes.

    Raises:
        UserError: the bundle is damaged, expired or of another role, or the folder is in use.
    """
    held = load_bundle(bundle)
    name = name or held.group
    if name not in held.roles:
        raise UserError(
            f"no role {name!r} in the bundle of {held.group}",
            place=str(bundle),
            remedy=f"one of: {', '.join(held.roles)}",
        )
    if folder is None:
        shared, spec = held.group == TRUNK_GROUP, held.spec
        folder = run_directory(spec, None) if shared else own_folder(spec, held.group)
    folder = folder.absolute()
    endpoints = fixed_endpoints(held.spec)
    _require_address(endpoints, name, listen)
    require_own(held, folder)
    if name == TRUNK_GROUP:  # a run of which this machine starts nothing else
        install(held, folder)
        placement = held.spec.placement.model_copy(update={"roles": [], "backend": LOCAL})
        spec = held.spec.model_copy(update={"placement": placement})
        return carry_out_or_explain(make_plan(spec, folder), detach=False)
    own = folder / "work" / name
    require_writable(own, "the role's folder", "mend the permissions, or name another --dir")
    with hold(own, role=name) as lock:
        run = install_role(held, folder, endpoints, lock=lock, listen=listen)
        (role,) = role_specs(run, here={name})
        write_targets(folder, held.spec, endpoints, held.roles)
        if name in trunk_names(held.spec):
            write_atomic(folder / SPEC_FILE, dump_resolved(held.spec))
            link_starting_model(run.spec, folder, run.machine)
        # The role takes this process over, and the lock of its folder with it.
        os.set_inheritable(lock, True)
        with pinned(role.cores):
            os.execvpe(role.command[0], role.command, {**os.environ, **role.env})  # noqa: S606
    raise AssertionError("a process that was replaced does not return")


def _require_address(endpoints: Endpoints, name: str, listen: str | None) -> None:
    """Refuse an address to listen on that is missing, malformed, or of no server.

    Raises:
        UserError: with what is to be said instead.
    """
    own = endpoints.all().get(name)
    if listen is None:
        if own is not None and not own.startswith("http://"):
            raise UserError(
                f"reached at {own}, where it cannot listen by itself",
                place=name,
                remedy="say with --listen HOST:PORT where it listens behind that",
            )
        return
    if own is None or name == "learner" or name in endpoints.islands:
        raise UserError("has no address of its own", place=name, remedy="leave --listen out")
    try:
        address(f"http://{listen}")
    except UserError as error:
        raise UserError(error.thing, place="--listen", remedy="say HOST:PORT") from error


PROGRESS_S = 5.0
"""Seconds between two requests for the coordinator's status."""
_LOOK_S = 0.2
_STATUS_TIMEOUT_S = 5.0
"""Ctrl-C waits for the answer."""
_MAX_STATUS_BYTES = 8 * 1024 * 1024
_MAX_REASON = 1000
_NO_ANSWER = (NoAnswer, ValueError, LookupError, TypeError, AttributeError)
"""What asking a coordinator raises that answers nothing, or something else."""
FOLDER = Path("join")


def join_command(
    link: Annotated[str, typer.Argument(metavar="URL", help="The run's join link.")],
    key: Annotated[Path, typer.Option("--key", help="Yours; made where there is none.")],
    public_key: Annotated[
        str | None, typer.Option("--public-key", help="The run's root, where URL has none.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="The run's name, where URL has none.")
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option("--pool", help="Which to serve.", show_default="the first that fits"),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Keeps versions, data, log.", show_default="join/RUN"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only says whether this machine fits.")
    ] = False,
) -> int:
    """Joins a run and works for it; returns the exit code: 0 when it is finished, or left."""
    try:
        whole = whole_link(parse_join_link(link), link, public_key, run)
        return _join(whole, key, pool, folder, check=check)
    except KeyboardInterrupt:  # while still preparing: nothing is held
        say("left before any work was taken")
        return 0


def _join(
    link: JoinLink, key_file: Path, named: str | None, folder: Path | None, *, check: bool
) -> int:
    modules = (*ROLE_MODULES["verify"], *ROLE_MODULES["sampler"])
    if absent := [name for name in modules if not module_is_installed(name)]:
        raise UserError(
            f"Python packages not installed here: {', '.join(absent)}",
            place="join",
            remedy=f"{install_command('sampler-cuda')} (or sampler-cpu)",
        )
    from verify import PERSON_S
    from verify.client import CoordinatorClient  # it needs them

    assert link.run is not None and link.root is not None, "the link is whole"
    folder, key = (folder or FOLDER / link.run).absolute(), own_key(key_file)
    client = CoordinatorClient(
        link.coordinator, key, run=link.run, root_public_key=link.root, deadline_s=PERSON_S
    )
    spec, site = client.spec(), client.site()
    say(f"run {spec.name}: {spec.steps} steps, pools {', '.join(p.name for p in spec.samplers)}")
    config = model_config(spec)
    if config is None:
        say(f"the size of {spec.model.hf} is not known here: memory and disk are not checked")
    to_fetch = sum(file.bytes for file in site.files)
    invited = named is not None or link.invite is not None
    pools = spec.samplers if invited else open_pools(spec)
    facts = look()
    found = {each.name: lacks(each, spec, config, facts, folder, to_fetch) for each in pools}
    pool = choose_pool(found, named)
    served_pool = served(next(p for p in pools if p.name == pool), spec, config, facts)
    assert isinstance(served_pool, SamplerPool), "choose_pool has said so"
    if check:
        say(f"this machine can serve pool {pool}{divided(served_pool)}")
        return 0
    if link.invite is not None:  # the worker that is started needs none after this
        client.register(pool, {}, invite=link.invite)
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder), StopSignals() as stops:
        say(f"working in pool {pool}{divided(served_pool)}; Ctrl-C leaves. Log: {folder}")
        relays = {str(i): reachable(url, link) for i, url in enumerate(site.weights)}
        identity = spec.identity.model_copy(update={"root_public_key": link.root})
        samplers = [served_pool if each.name == pool else each for each in spec.samplers]
        worker = Worker(
            spec=spec.model_copy(update={"identity": identity, "samplers": samplers}),
            endpoints=Endpoints(link.coordinator, relays=relays),
            key=key_file.absolute(),
            folder=folder,
            pool=served_pool,
            cores=this_machine().cores,
            tell=say,
        )
        try:
            return _work(worker, Progress(link, key.public_hex), stops)
        finally:
            if worker.exit_code is None:
                worker.kill()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _work(worker: Worker, progress: Progress, stops: StopSignals) -> int:
    """Waits for the worker's end, or until the volunteer has enough; returns the exit code."""
    while not worker.wait(_LOOK_S):
        progress.look()
        if asked := stops():
            say("leaving: handing in what is done, giving the rest back")
            worker.leave()
            ends = time.monotonic() + LEAVE_S
            while not worker.wait(_LOOK_S):
                if time.monotonic() > ends or stops() > asked:
                    worker.kill()
                    say("the worker was killed, as it did not end in time; its leases expire")
                    return 0
            say("left; thank you")
            return 0
    progress.look(now=True)
    if worker.exit_code == 0:
        say("the run is finished; thank you")
        return 0
    if not worker.last_error:
        say(f"the worker ended with exit code {worker.exit_code}; its log says why")
    return 1


class Progress:
    """Prints what became of our work, each time that it changed.

    Args:
        link: of the run.
        key: ours.
    """

    def __init__(self, link: JoinLink, key: str) -> None:
        self._url, self._key = link.coordinator, key
        self._next, self._last, self._away = 0.0, "", False

    def look(self, *, now: bool = False) -> None:
        """Asks the coordinator, at most every few seconds, and prints a line where it is news."""
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PROGRESS_S
        try:
            line = progress_line(
                _answer(f"{self._url}/v1/status"), _answer(f"{self._url}/v1/workers/{self._key}")
            )
        except _NO_ANSWER as error:
            if not self._away and not now:  # a run that is finished may be gone already
                say(f"the coordinator does not answer ({type(error).__name__}); work goes on")
            self._away = True
            return
        self._away = False
        if line and line != self._last:
            say(line)
            self._last = line


def progress_line(status: dict[str, Any], mine: dict[str, Any]) -> str:
    """Version, speed and credit of one worker; empty before the coordinator knows it.

    Args:
        status: answer of `GET /v1/status`.
        mine: answer of `GET /v1/workers/KEY`; empty if the coordinator does not know the key.
    """
    if not mine:
        return ""
    version = mine["state"].get("version", -1)
    loaded = f"version {version}" if isinstance(version, int) and version >= 0 else "no version yet"
    parts = [
        f"step {status['steps_closed']} of {status['steps']}",
        loaded,
        f"{mine.get('open_leases', 0)} leases open",
        f"{per_second(mine.get('tokens_per_s'))} tokens/s",
        f"{mine['accepted_rollouts']} rollouts accepted",
        f"{mine['rejected_submissions']} submissions rejected",
        f"credit {mine['accepted_tokens']:,} tokens",
    ]
    if mine.get("reason"):
        parts.append(f"{mine['standing']}: {one_line(str(mine['reason']), _MAX_REASON)}")
    return ", ".join(parts)


def _answer(url: str) -> dict[str, Any]:
    """Return an answer of the coordinator's; empty if it has none of what is asked for."""
    answer = fetch_now("GET", url, max_bytes=_MAX_STATUS_BYTES, timeout_s=_STATUS_TIMEOUT_S)
    if answer.status == HTTPStatus.NOT_FOUND:
        return {}
    if not answer.is_success:
        raise ValueError(f"status {answer.status}")
    return parse_object(answer.content, max_bytes=_MAX_STATUS_BYTES)


def whole_link(link: JoinLink, text: str, public_key: str | None, run: str | None) -> JoinLink:
    """Return the link with what the options say; the coordinator is asked for a missing name."""
    root = link.root or public_key
    if root is None:
        raise UserError(
            "nothing says whose signatures count",
            place=text[:200],
            remedy="take the whole link, with #run=NAME&root=HEX, or give --public-key HEX",
        )
    run = link.run or run
    if run is None:
        thing, remedy = "cannot ask the coordinator", "check the address, or give --run NAME"
        with reported(f"{thing} for its run", link.coordinator, remedy, *_NO_ANSWER):
            run = str(_answer(f"{link.coordinator}/v1/status")["run"])
    return replace(link, run=run, root=root)


def own_key(path: Path) -> SigningKey:
    """Return the volunteer's key, made on first use, readable by its owner alone."""
    if not path.exists():
        with suppress(FileExistsError):  # another join was quicker
            SigningKey.generate().save(path)
            say(f"made a key: {path}. Credit is counted under it: keep it, show it to nobody")
    return SigningKey.load(path)
