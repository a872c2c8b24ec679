"""The worst mixtures that `python -m tests.campaigns worst_mixtures` found."""

from tests.runspec.simulate.mixtures import Group, Run


def keys(count: int, kind: str, misdeed="withhold", record=1, *, after=None, **when) -> Group:
    strategy = {"kind": kind, "misdeed": misdeed, "record": record, "after": after}
    return {"count": count, "strategy": strategy, **when}


def strangers(count: int, speed: float, async_level: int = 2, *, lease: int = 8) -> Run:
    return Run(0, count, speed, async_level, lease=lease, steps=20)


CRASHING = {"stays": "60s", "away": "1s", "crashes": 0.5}
BRIEF = {"stays": "5s", "away": "1s", "crashes": 0.5}
HALF_HONEST = {"kind": "alternate", "misdeed": "withhold", "of": 6, "honest": 3}


def found(run: Run, *hostile: Group) -> tuple[Run, list[Group]]:
    return run, [{**group, "name": f"hostile{number}"} for number, group in enumerate(hostile)]


FOUND = [
    found(
        Run(lease=1, steps=20),
        keys(25, "sleeper", "wrong", 2, **CRASHING),
        keys(2, "late", "wrong", 2, after="61ms", over="2s"),
        keys(1, "collude", "withhold", 2, over="2s"),
        keys(1, "collude", "wrong", 1, **BRIEF, speed=2.0),
    ),
    found(
        strangers(2, 2.0, lease=1),
        keys(14, "wrong", stays="60s", away="30s", crashes=1.0, speed=2.0),
        keys(15, "rubbish", arrives="2s"),
        keys(1, "collude", "rubbish", 5, arrives="2s"),
    ),
    found(
        strangers(2, 0.5, 0, lease=1),
        keys(38, "rubbish", arrives="2s", **CRASHING),
        keys(10, "rubbish"),
        keys(3, "late", "rubbish", 1, after="2994ms", arrives="10s"),
    ),
    found(
        strangers(2, 0.25),
        keys(20, "wrong"),
        keys(1, "sleeper", "rubbish", 5, arrives="2s", speed=4.0),
        keys(1, "withhold", **BRIEF),
    ),
    found(
        strangers(4, 0.25),
        keys(16, "collude", "refuse", 3, stays="60s", away="1s"),
        keys(20, "rubbish", speed=0.25),
    ),
    found(
        strangers(2, 0.25, lease=4),
        keys(11, "withhold"),
        keys(20, "late", "rubbish", 1, after="424ms", stays="60s", away="30s", speed=0.5),
        keys(1, "rubbish", arrives="10s", over="2s", speed=0.25),
        keys(2, "collude", "wrong", 5, **CRASHING),
    ),
    found(
        strangers(4, 0.25, 0, lease=4),
        {"count": 40, "strategy": HALF_HONEST, "arrives": "10s", "speed": 0.25},
    ),
]
"""The fourth to sixth took strangers 8 to 14 times as long while a worker was no more patient with
its own rank than with others."""
