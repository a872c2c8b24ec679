"""Attacks on rollouts of several turns, 500 submissions each: all that change a token are rejected.

A lie about turns changes what the submission says of them. A cheat samples other tokens than the
lease's; where it happens to sample the same, nothing that is trained has changed, and the
submission is accepted as the honest one is. SUBMISSIONS chooses another number.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.attacks.test_turns import CHEATS, LIES, cheated, same_tokens, told_a_lie
from tests.verify.bench import lease_for
from tests.verify.turns import TurnsBench

SUBMISSIONS = int(os.environ.get("SUBMISSIONS", "500"))


def run() -> dict[str, object]:
    """How many submissions of each kind were accepted and rejected.

    Raises:
        AssertionError: honest work was rejected, or an attack that changed something was not.
    """
    found = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        bench = TurnsBench(Path(folder))
        for index in range(SUBMISSIONS):
            if index % 50 == 0:
                print(f"{index} of {SUBMISSIONS} leases", file=sys.stderr, flush=True)
            keys = bench.worker_key, bench.coordinator_key
            bench.signed_lease, bench.lease = lease_for(*keys, index=index)
            honest = bench.honest()
            verdict = bench.verdict(honest)
            assert verdict.accepted, (index, verdict.reason)
            found["honest accepted"] += 1
            for lie in LIES:
                rollouts = [*honest]
                if told_a_lie(rollouts, lie) is None:
                    continue
                verdict = bench.verdict(rollouts)
                assert not verdict.accepted, (index, lie)
                found["lies about turns rejected"] += 1
            for cheat in CHEATS:
                rollouts, name = cheated(bench, cheat), cheat.__name__
                same, verdict = same_tokens(rollouts, honest), bench.verdict(rollouts)
                assert verdict.accepted == same, (index, name, verdict.reason)
                found[f"{name} {'accepted, same tokens' if same else 'rejected'}"] += 1
    return {**found}
