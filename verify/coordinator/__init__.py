"""The coordinator: leases work, receives submissions and verdicts, closes each step once.

`machine` has the facts of a run, the state that follows from them, and the decisions: all pure.
`journal` records a fact in the `ledger`, then applies it. `handlers` answer the requests of
workers, validators, islands and the operator. `run` is the process, which serves them, and acts
when time passes; `authentication` limits what strangers can ask for.
"""
