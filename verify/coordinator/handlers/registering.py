"""Handler for workers that register: which keys may work, in which pool, with which devices.

Work from trusted pools is checked less. So they take only keys that the operator named: the run's
own keys, and keys with an invite for that pool.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from aiohttp import web

from runspec.core.models import not_accepted
from runspec.core.roles import open_invite
from runspec.core.schema import RunSpec, SamplerPool
from runspec.core.signed import BadSignature
from verify.coordinator.authentication import Limiter, count_new_key
from verify.coordinator.handlers import RunContext, Signed
from verify.coordinator.handlers.workers import scalars
from verify.coordinator.machine import events
from verify.coordinator.requests import Refusal, refusing
from verify.profile import devices_of

_log = logging.getLogger(__name__)
_KIND = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
MAX_TENSOR = 4096


class Registering:
    """Registers workers, and puts those on probation whose devices nobody measured.

    Args:
        run: the run.
        own: public keys of the run's own workers.
        limiter: limits keys without an invite.
        steady: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        run: RunContext,
        own: Collection[str],
        limiter: Limiter,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._journal, self._own = run, run.journal, frozenset(own)
        self._limiter, self._steady = limiter, steady
        self._pools = {pool.name: pool for pool in run.spec.samplers}
        self._trusted = {pool.name for pool in run.spec.samplers if pool.trust == "trusted"}
        for key in self._journal.state.workers:  # profiles may have come or gone
            self._set_probation(key)

    def routes(self) -> list[web.RouteDef]:
        fields = "pool", "info", "?invite"
        return [self._run.post("/v1/workers", self._register, *fields, by="registration")]

    async def _register(self, asked: Signed) -> None:
        body = asked.body
        if not isinstance(body["pool"], str) or not isinstance(body["info"], dict):
            raise Refusal(400, "pool must be a name and info a map")
        with refusing(400, ValueError, what="info: "):
            info = scalars(body["info"])
        address = self._run.authentication.address(asked.http)
        self.register(asked.key, body["pool"], body.get("invite"), address=address, info=info)
        self._run.workers.registered(asked.key, info, self._journal.clock())

    def register(
        self,
        key: str,
        pool: str,
        invite: object = None,
        *,
        address: str,
        info: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Register a key as a worker of a pool. A second call changes nothing and needs no invite.

        Args:
            key: public key of the worker.
            pool: name of the pool.
            invite: invite that the worker sent, unchecked.
            address: address of the client.
            info: what the worker says of itself: its `device`, which must be one that the pool
                accepts, the `memory` of one, and how many (`tensor`) divide the model.

        Raises:
            Refusal: there is no such pool; or the key has a role, belongs to another pool or other
                devices, is not invited, or is one too many; or the pool takes no such device.
        """
        require_pools(self._run.spec)
        if pool not in self._pools:
            raise Refusal(404, f"the run has no pool {pool!r}; it has {', '.join(self._pools)}")
        if key in self._run.roles.keys:
            raise Refusal(403, "a key with a role cannot be a worker's")
        devices = "" if key in self._own else _devices(self._pools[pool], info)
        known = self._journal.state.workers.get(key)
        if known is not None and known.pool != pool:
            raise Refusal(409, f"this key is a worker of pool {known.pool!r}")
        if known is not None and known.devices != devices:
            # By its devices a key would choose among the limits of its checks.
            had, now_has = (each or "the pool's own devices" for each in (known.devices, devices))
            raise Refusal(409, f"this key is registered with {had}: make another for {now_has}")
        if known is None:
            now = self._journal.clock()
            by = self.admit(key, pool, invite, now, address=address)
            own = by is None and key in self._own
            self._journal.record(events.WorkerRegistered(now, key, pool, by, own, devices))
            _log.info("worker %s of pool %s registered %s", key[:16], pool, devices)
            self._set_probation(key)

    def _set_probation(self, key: str) -> None:
        worker = self._journal.state.workers[key]
        if worker.pool not in self._pools:  # taken out of the spec
            return
        on = self._run.limits.of(worker.pool, worker.devices).probation
        if on != worker.probation:
            self._journal.record(events.ProbationChanged(self._journal.clock(), key, on))

    def admit(self, key: str, pool: str, used: object, now: float, *, address: str) -> str | None:
        """Return the public key of the invite that admits a new key; None if it needs none.

        Args:
            key: public key of the worker.
            pool: pool that it wants to serve.
            used: invite that it sent; None without one.
            now: seconds since the epoch.
            address: address of the client.

        Raises:
            Refusal: 403 with the reason, or 429.
        """
        state, spec, roles = self._journal.state, self._run.spec, self._run.roles
        if used is None:
            if key in self._own:
                return None
            if pool in self._trusted:
                raise Refusal(
                    403,
                    f"pool {pool!r} is trusted: it takes the run's own workers, and keys with an "
                    "invite for this pool",
                )
            if spec.verify.admission == "open":
                count_new_key(self._limiter, state, address, now=self._steady())
                return None
            raise Refusal(403, "this run takes invited workers only: ask for a link with an invite")
        with refusing(403, BadSignature):
            invite = open_invite(
                used,
                run=spec.name,
                worker=key,
                coordinators=roles.coordinator,
                now=now,
            )
        if invite.key in state.revoked:
            raise Refusal(403, f"the invite was revoked: {state.revoked[invite.key]}")
        if invite.pool is not None and invite.pool != pool:
            raise Refusal(403, f"the invite is for pool {invite.pool!r}")
        if (times := state.invited.get(invite.key, 0)) >= invite.uses:
            raise Refusal(403, f"the invite was used {times} times, as often as it may be")
        if pool in self._trusted and invite.pool is None:
            raise Refusal(403, f"pool {pool!r} is trusted, and the invite does not name it")
        return invite.key


def require_pools(spec: RunSpec) -> None:
    """Refuse what a run without workers does not serve.

    Raises:
        Refusal: 404.
    """
    if spec.supervised is not None:
        kind = spec.algorithm.kind
        raise Refusal(404, f"a run of algorithm.kind {kind} trains on documents: no workers")


def _devices(pool: SamplerPool, info: Mapping[str, object]) -> str:
    """Return the devices that a worker says it has, in the form of `Lease.devices`.

    Raises:
        Refusal: the pool does not accept them.
    """
    kind, tensor = info.get("device", pool.hardware.kind), info.get("tensor", pool.parallel.tensor)
    if not (isinstance(kind, str) and _KIND.fullmatch(kind)):
        raise Refusal(400, "device must be a kind of hardware")
    if type(tensor) is not int or not 0 < tensor <= MAX_TENSOR:
        raise Refusal(400, f"tensor must be a number of devices, at most {MAX_TENSOR}")
    memory = info.get("memory")
    known = float(memory) if isinstance(memory, int | float) else None
    if reason := not_accepted(pool, kind, known):
        raise Refusal(403, f"pool {pool.name}: {reason}")
    return devices_of(pool, kind, tensor)
