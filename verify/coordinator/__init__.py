"""The coordinator: leases work, receives submissions and verdicts, closes each step once.

`machine` has the facts of a run, the state that follows from them, and the decisions: all pure.
`services` serve workers, validators and the operator, and act when time passes; `journal` there
records the facts in `verify.ledger`. `server` speaks HTTP, `run` is the process, and `edge` limits
what strangers can ask for.
"""
