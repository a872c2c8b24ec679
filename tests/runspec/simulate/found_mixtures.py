"""The worst mixtures that `python -m tests.campaigns worst_mixtures` found."""

from __future__ import annotations

from tests.runspec.simulate.mixtures import Group, Run

FOUND: list[tuple[Run, list[Group]]] = [
    (
        Run(lease=1, steps=20),
        [
            {
                "name": "hostile0",
                "count": 25,
                "strategy": {"kind": "sleeper", "misdeed": "wrong", "record": 2},
                "stays": "60s",
                "away": "1s",
                "crashes": 0.5,
            },
            {
                "name": "hostile1",
                "count": 2,
                "strategy": {"kind": "late", "misdeed": "wrong", "record": 2, "after": "61ms"},
                "over": "2s",
            },
            {
                "name": "hostile2",
                "count": 1,
                "strategy": {"kind": "collude", "misdeed": "withhold", "record": 2},
                "over": "2s",
            },
            {
                "name": "hostile3",
                "count": 1,
                "strategy": {"kind": "collude", "misdeed": "wrong", "record": 1},
                "stays": "5s",
                "away": "1s",
                "crashes": 0.5,
                "speed": 2.0,
            },
        ],
    ),
    (
        Run(known=0, strangers=2, speed=2.0, lease=1, steps=20),
        [
            {
                "name": "hostile0",
                "count": 14,
                "strategy": {"kind": "wrong"},
                "stays": "60s",
                "away": "30s",
                "crashes": 1.0,
                "speed": 2.0,
            },
            {"name": "hostile1", "count": 15, "strategy": {"kind": "rubbish"}, "arrives": "2s"},
            {
                "name": "hostile2",
                "count": 1,
                "strategy": {"kind": "collude", "misdeed": "rubbish", "record": 5},
                "arrives": "2s",
            },
        ],
    ),
    (
        Run(known=0, strangers=2, speed=0.5, async_level=0, lease=1, steps=20),
        [
            {
                "name": "hostile0",
                "count": 38,
                "strategy": {"kind": "rubbish"},
                "arrives": "2s",
                "stays": "60s",
                "away": "1s",
                "crashes": 0.5,
            },
            {"name": "hostile1", "count": 10, "strategy": {"kind": "rubbish"}},
            {
                "name": "hostile2",
                "count": 3,
                "strategy": {"kind": "late", "misdeed": "rubbish", "record": 1, "after": "2994ms"},
                "arrives": "10s",
            },
        ],
    ),
    (
        Run(known=0, strangers=2, speed=0.25, steps=20),
        [
            {"name": "hostile0", "count": 20, "strategy": {"kind": "wrong"}},
            {
                "name": "hostile1",
                "count": 1,
                "strategy": {"kind": "sleeper", "misdeed": "rubbish", "record": 5},
                "arrives": "2s",
                "speed": 4.0,
            },
            {
                "name": "hostile2",
                "count": 1,
                "strategy": {"kind": "withhold"},
                "stays": "5s",
                "away": "1s",
                "crashes": 0.5,
            },
        ],
    ),
    (
        Run(known=0, strangers=4, speed=0.25, steps=20),
        [
            {
                "name": "hostile0",
                "count": 16,
                "strategy": {"kind": "collude", "misdeed": "refuse", "record": 3},
                "stays": "60s",
                "away": "1s",
                "crashes": 0.0,
            },
            {"name": "hostile1", "count": 20, "strategy": {"kind": "rubbish"}, "speed": 0.25},
        ],
    ),
    (
        Run(known=0, strangers=2, speed=0.25, lease=4, steps=20),
        [
            {"name": "hostile0", "count": 11, "strategy": {"kind": "withhold"}},
            {
                "name": "hostile1",
                "count": 20,
                "strategy": {"kind": "late", "misdeed": "rubbish", "record": 1, "after": "424ms"},
                "stays": "60s",
                "away": "30s",
                "crashes": 0.0,
                "speed": 0.5,
            },
            {
                "name": "hostile2",
                "count": 1,
                "strategy": {"kind": "rubbish"},
                "arrives": "10s",
                "over": "2s",
                "speed": 0.25,
            },
            {
                "name": "hostile3",
                "count": 2,
                "strategy": {"kind": "collude", "misdeed": "wrong", "record": 5},
                "stays": "60s",
                "away": "1s",
                "crashes": 0.5,
            },
        ],
    ),
    (
        Run(known=0, strangers=4, speed=0.25, async_level=0, lease=4, steps=20),
        [
            {
                "name": "hostile0",
                "count": 40,
                "strategy": {"kind": "alternate", "misdeed": "withhold", "of": 6, "honest": 3},
                "arrives": "10s",
                "speed": 0.25,
            }
        ],
    ),
]
"""The fourth to sixth took strangers 8 to 14 times as long while a worker was no more patient with
its own rank than with others."""
