"""Limits measured for one pair of sampler and validator, and the signed profile that has them.

Commands `calibrate` and `sign-profile` of `python -m verify`. `calibrate` recomputes the
submissions of a pool of an honest run, measures them, and derives a profile of limits.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points, packages_distributions, version
from logging import Logger
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.models import read_config
from runspec.core.process import run_role
from runspec.core.schema import RunSpec
from runspec.core.schema.load import MAX_PROFILE_BYTES, load_resolved
from runspec.core.schema.source_files import PREFILL_GROUP
from runspec.core.signed import BadSignature, SigningKey
from verify import profile as form
from verify.calibration import measure
from verify.calibration.derive import as_table, derive
from verify.commands import run_once, say
from verify.profile import Profile, kind_and_tensor, open_profile, sign_profile
from verify.thresholds import limits_for, precision_of

_LIBRARIES = ("jax", "torch", "vllm", "transformers")
_VALID_S = 365 * 86400.0
_COUNTS = ("submissions", "rollouts", "tokens", "chunks")


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add `calibrate` and `sign-profile` to a command line."""
    one = commands.add_parser(
        "calibrate",
        help="measure an honest pool and write a signed profile of limits",
        description="Recomputes the submissions of a run whose workers were all honest with the "
        "engine that its spec names, and writes the limits that follow as a signed profile. Exits "
        "0, 1 if that fails, 2 on bad usage, 3 on an internal error.",
    )
    one.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    one.add_argument("--pool", required=True, help="the sampler pool of the spec to calibrate")
    one.add_argument(
        "--worker",
        metavar="KEY",
        help="measure this worker of yours and its devices (its public key, 64 characters); "
        "default: all with the devices of the pool's `hardware`",
    )
    one.add_argument("--key", required=True, type=Path, metavar="FILE", help="signs the profile")
    one.add_argument("--out", required=True, type=Path, metavar="PROFILE", help="the file to write")
    one.add_argument(
        "--weights",
        type=Path,
        metavar="DIR",
        help="folder of fetched versions, as of a validator; default: the run directory's",
    )
    one.add_argument(
        "--rate",
        type=_rate,
        default=1e-6,
        help="share of honest rollouts that may be rejected (%(default)s)",
    )
    one.add_argument(
        "--allow-looser",
        action="store_true",
        help="set limits looser than the published ones if the pool needs it, and print which",
    )
    one.set_defaults(body=lambda options: _run(_calibrate, options))
    other = commands.add_parser(
        "sign-profile",
        help="sign a profile with another key, such as the root's, and print it",
        description="The root key is not kept with the run. So calibrate with another key, bring "
        "the file to the root key, read its contents, and sign it there.",
    )
    other.add_argument("profile", type=Path, metavar="PROFILE", help="as `calibrate` wrote it")
    other.add_argument("--key", required=True, type=Path, metavar="FILE", help="the root's key")
    other.add_argument("--out", required=True, type=Path, metavar="FILE", help="the file to write")
    other.set_defaults(body=lambda options: _run(_sign, options))


def _run(body: Callable[[argparse.Namespace, Logger], None], options: argparse.Namespace) -> int:
    """Run a command. SIGTERM is handled like Ctrl-C, so that copies of weights are removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_once(lambda: run_role(options.command, lambda log: body(options, log)))
    finally:
        signal.signal(signal.SIGTERM, before)


def _calibrate(options: argparse.Namespace, log: Logger) -> None:
    key = SigningKey.load(options.key)
    _require_writable(options.out)
    profile = calibrate(
        options.run_dir,
        options.pool,
        worker=options.worker,
        fetched=options.weights,
        rate=options.rate,
        allow_looser=options.allow_looser,
        log=log,
    )
    _write(options.out, profile, key, log)


def _sign(options: argparse.Namespace, log: Logger) -> None:
    try:
        data = read_bounded(options.profile, MAX_PROFILE_BYTES)
        profile = open_profile(data, root_public_key=None)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot be read: {reason}", place=str(options.profile)) from error
    except BadSignature as error:
        raise UserError(str(error), place=str(options.profile), remedy="calibrate again") from error
    key = SigningKey.load(options.key)
    _require_writable(options.out)
    _write(options.out, profile, key, log)


def _write(path: Path, profile: Profile, key: SigningKey, log: Logger) -> None:
    write_atomic(path, sign_profile(profile, key))
    with suppress(BrokenPipeError):  # the profile is written
        say(_profile_text(profile))
    log.info("%s: signed by %s", path, key.public_hex[:16])


def _require_writable(path: Path) -> None:
    """Require a file that can be written, before hours of measuring.

    Raises:
        UserError: it cannot be written.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(
            "no profile can be written here",
            place=str(path),
            remedy="name with --out a file in a folder that you may write",
        )


def _profile_text(profile: Profile) -> str:
    s, v, m, seen = profile.sampler, profile.validator, profile.model, profile.measured
    releases = ", ".join(f"{name} {release}" for name, release in v.releases.items())
    lines = [
        f"sampler: {s.engine}, {s.precision}, {s.hardware} x {s.tensor or '-'}; temperature "
        f"{s.sampling.temperature:g}, top_p {s.sampling.top_p:g}, top_k {s.sampling.top_k}",
        f"validator: {v.engine}, {v.precision}, {v.hardware} ({releases})",
        f"model: hidden size {m.hidden_size}, {m.num_hidden_layers} layers, "
        f"vocabulary {m.vocab_size}",
        f"measured: run {seen.run}, versions {seen.oldest_version} to {seen.newest_version}; "
        f"{seen.submissions} submissions, {seen.rollouts} rollouts, {seen.tokens} tokens, "
        f"{seen.chunks} chunks",
        f"rate of false rejections: {profile.rate:g} a rollout by {profile.formula}, of all "
        "numbers whose limit is not below their bound",
        "",
        f"{'number':24} {'samples':>8} {'median':>10} {'largest':>10} {'bound':>10} "
        f"{'published':>10} {'limit':>10}",
    ]
    for name, n in profile.numbers.items():
        cells = (n.quantiles.get("0.5"), n.quantiles.get("1"), n.bound, n.published, n.limit)
        shown = " ".join(f"{'-' if c is None else format(c, '.4g'):>10}" for c in cells)
        lines.append(f"{name:24} {n.samples:8} {shown}  {n.note}".rstrip())
    if profile.looser:
        lines.append(f"LOOSER than published: {', '.join(profile.looser)}")
    return "\n".join(lines)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate <= 0.1:
        raise argparse.ArgumentTypeError("a share above 0, up to 0.1, is needed")
    return rate


def calibrate(
    run_dir: Path,
    name: str,
    *,
    worker: str | None = None,
    fetched: Path | None = None,
    rate: float = 1e-6,
    allow_looser: bool = False,
    log: Logger,
) -> Profile:
    """Measure a pool of an honest run and derive its profile.

    Args:
        run_dir: the run's directory.
        name: name of the pool.
        worker: the only worker that is measured; None: all with the pool's own devices.
        fetched: folder of fetched versions; None: those of the run directory.
        rate: share of honest rollouts that may be rejected.
        allow_looser: whether limits may be looser than the published ones.
        log: receives the progress.

    Raises:
        UserError: there are no honest submissions, or too few.
    """
    spec = load_resolved(run_dir)
    pool = next((pool for pool in spec.samplers if pool.name == name), None)
    if pool is None:
        raise UserError(
            f"no pool {name[:80]!r}",
            place=str(run_dir),
            remedy=f"name one of {', '.join(pool.name for pool in spec.samplers)}",
        )
    published = limits_for(precision_of(pool), spec.learner.compute_dtype)
    taken, versions = _with_weights(run_dir, spec, name, worker, fetched, log)
    kind, tensor = kind_and_tensor(pool, taken[0].lease.devices)
    measured = measure.Measurements()
    with tempfile.TemporaryDirectory(prefix="calibrate-") as cache:
        for version in versions.values():
            measure.link_version(version, Path(cache))
        for _, pairs in measure.recomputed(taken, spec, pool, Path(cache), published.gap):
            measured.take(pairs, published)
            if measured.submissions % measure.AT_ONCE == 0:
                log.info("%d of %d submissions recomputed", measured.submissions, len(taken))
    derived = derive(measured, published, rate=rate, allow_looser=allow_looser)
    folder = versions[max(versions)].folder
    try:
        config = read_config(folder)
        model = form.ModelSide(**{name: config[name] for name in form.ModelSide.model_fields})
    except (KeyError, ValueError) as error:
        raise UserError(f"does not say the model's size: {error}", place=str(folder)) from error
    now = time.time()
    return form.Profile(
        version=1,
        formula=form.FORMULA,
        issued=now,
        expires=now + _VALID_S,
        rate=rate,
        sampler=form.SamplerSide(
            engine=pool.engine,
            precision=precision_of(pool),
            hardware=kind,
            tensor=tensor,
            sampling=form.SamplingSide.model_validate(pool.sampling, from_attributes=True),
        ),
        validator=form.ValidatorSide(
            engine=spec.verify.engine,
            precision=spec.learner.compute_dtype,
            hardware=form.validator_hardware(spec),
            releases=_releases(spec.verify.engine),
        ),
        model=model,
        measured=form.Measured(
            run=spec.name,
            oldest_version=min(versions),
            newest_version=max(versions),
            **{count: getattr(measured, count) for count in _COUNTS},
            seeded=pool.sampling.seeded,
        ),
        numbers=derived.numbers,
        looser=derived.looser,
        limits=as_table(derived.limits),
    )


def _with_weights(
    run_dir: Path, spec: RunSpec, pool: str, worker: str | None, fetched: Path | None, log: Logger
) -> tuple[list[measure.ReceivedSubmission], dict[int, measure.Version]]:
    """Return the submissions whose weights are still there, and their versions."""
    found = measure.submissions_of(run_dir, spec, pool, worker)
    digests = {taken.lease.version: taken.lease.manifest_digest for taken in found}
    versions = {
        number: where
        for number, digest in digests.items()
        if (where := measure.find_version(run_dir, spec.name, number, digest, fetched))
    }
    taken = [each for each in found if each.lease.version in versions]
    log.info(
        "%d submissions of pool %s, %d of them with weights on this machine (versions %s)",
        len(found),
        pool,
        len(taken),
        ", ".join(map(str, sorted(versions))) or "none",
    )
    if not taken:
        raise UserError(
            f"no submission of pool {pool} whose weights are on this machine",
            place=str(run_dir),
            remedy="calibrate while the run is up or soon after, or keep more versions "
            "(`broadcast.keep_versions`); --weights names a folder of fetched ones",
        )
    return taken, {each.lease.version: versions[each.lease.version] for each in taken}


def _releases(engine: str) -> dict[str, str]:
    """Return the releases of the engine's package and of the libraries that it has loaded."""
    points = [p for p in entry_points(group=PREFILL_GROUP) if p.name == engine and p.dist]
    found = {point.dist.name: point.dist.version for point in points if point.dist}
    names = packages_distributions()  # vLLM's distribution has a name for each kind of hardware
    loaded = [dist for name in _LIBRARIES if name in sys.modules for dist in names.get(name, [])]
    return found | {dist: version(dist) for dist in loaded}
