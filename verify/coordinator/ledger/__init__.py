"""The ledger of a run: its events, where they are stored, and how they are read.

`ledger` is the one writer's side, over a `store` in SQLite or `postgres`, which execute the same
statements. `snapshot` reads the rows of a run, which may be live, without a lock.
"""
