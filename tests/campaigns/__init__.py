"""Campaigns: long measurements and hunts for faults that run by hand, not in `make test`.

Each module of this package is one campaign. The first line of its docstring says what it shows,
and `run()` returns figures: `{name: value}`, or `{part: {name: value}}` where each part has a row
of its own. It raises where what it shows does not hold.
"""
