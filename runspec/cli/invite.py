"""`runspec invite`: a join link that admits so many keys, signed with the coordinator's key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runspec.common.errors import UserError
from runspec.common.invite import make_invite
from runspec.common.keys import SigningKey
from runspec.local.link import run_link
from runspec.local.run_dir import find_run
from runspec.spec.resolved import load_resolved
from runspec.spec.values import parse_duration


def invite_command(run: str, pool: str | None, uses: int, expires: str, runs_dir: Path) -> int:
    """Prints the link; returns the exit code. The run need not be alive."""
    run_dir = find_run(run, runs_dir)
    spec = load_resolved(run_dir)
    pools = [each.name for each in spec.samplers]
    if pool is not None and pool not in pools:
        raise UserError(
            f"no sampler pool {pool!r}", place="--pool", remedy=f"the spec has: {', '.join(pools)}"
        )
    if pool is None and all(each.trust == "trusted" for each in spec.samplers):
        raise UserError(
            "every pool is trusted, and a trusted pool takes only invites that name it",
            place="--pool",
            remedy=f"name one: {', '.join(pools)}",
        )
    link = run_link(run_dir, spec)
    if link is None:
        raise UserError(
            "has no address and no keys yet",
            place=str(run_dir),
            remedy="start it with `runspec apply`",
        )
    text = make_invite(
        spec.name,
        pool=pool,
        uses=uses,
        valid_s=_seconds(expires),
        coordinator=SigningKey.load(run_dir / "keys" / "coordinator.key"),
    )
    print(replace(link, invite=text))
    return 0


def _seconds(expires: str) -> float:
    try:
        return parse_duration(expires)
    except ValueError as error:
        raise UserError(str(error), place="--expires") from error
