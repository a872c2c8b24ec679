"""The ledger of a run: its events, where they are stored, and how they are read.

`ledger` has the one writer's side and the readers', over a `store` in SQLite or `postgres`, which
execute the same statements.
"""
