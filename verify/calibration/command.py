"""Commands `calibrate` and `sign-profile` of `python -m verify`: arguments, output, files."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING

from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.keys import SigningKey
from runspec.core.process import run_role
from runspec.core.signed import BadSignature
from verify.commands import run_once, say

if TYPE_CHECKING:
    from verify.calibration.run import Outcome
    from verify.profile import Profile

_NOISES = (0.005, 0.01, 0.02, 0.04)


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
    one.add_argument(
        "--perturbed",
        action="store_true",
        help="test the limits with weights that have noise of 0.5 to 4 %%, or are rounded to int8",
    )
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
    from verify.calibration.prefills import int8, noise
    from verify.calibration.run import Order, calibrate
    from verify.profile import sign_profile

    key = SigningKey.load(options.key)
    _require_writable(options.out)
    perturbed = [(f"weights off by {100 * share:g}%", noise(share)) for share in _NOISES]
    outcome = calibrate(
        Order(
            run_dir=options.run_dir,
            pool=options.pool,
            fetched=options.weights,
            rate=options.rate,
            allow_looser=options.allow_looser,
            perturbed=[*perturbed, ("weights in int8", int8)] if options.perturbed else [],
        ),
        log,
    )
    _write(options.out, sign_profile(outcome.profile, key), _as_text(outcome), key, log)


def _sign(options: argparse.Namespace, log: Logger) -> None:
    from runspec.core.spec.resolved import MAX_PROFILE_BYTES
    from verify.profile import open_profile, sign_profile

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
    _write(options.out, sign_profile(profile, key), _profile_text(profile), key, log)


def _write(path: Path, document: bytes, text: str, key: SigningKey, log: Logger) -> None:
    write_atomic(path, document)
    with suppress(BrokenPipeError):  # the profile is written
        say(text)
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


def _as_text(outcome: Outcome) -> str:
    lines = [_profile_text(outcome.profile), "", "rejected, of submissions (of rollouts alone):"]
    for each in outcome.power:
        for limits, found in (("published", each.published), ("profile", each.profile)):
            by = ", ".join(f"{name} {count}" for name, count in found.named().items())
            lines.append(
                f"  {each.weights}, {limits}: {found.rejected_submissions} of {found.submissions} "
                f"({found.rejected_rollouts} of {found.rollouts}); {by}"
            )
    return "\n".join(lines)


def _profile_text(profile: Profile) -> str:
    s, v, m, seen = profile.sampler, profile.validator, profile.model, profile.measured
    releases = ", ".join(f"{name} {release}" for name, release in v.releases.items())
    lines = [
        f"sampler: {s.engine}, {s.precision}, {s.hardware}; temperature "
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
