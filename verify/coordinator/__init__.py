"""The coordinator: leases work, receives submissions and verdicts, closes each step once.

`machine` has the facts of a run, the state that follows from them, and the decisions: all pure.
`journal` records a fact in the `ledger`, then applies it. `handlers` answer the requests of
workers, validators, islands and the operator; `closing` acts when time passes. `run` is the
process, which serves them; `authentication` limits what strangers can ask for.
"""
