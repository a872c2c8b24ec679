"""The coordinator: leases work, takes submissions and verdicts in, closes each step once.

`events` are the facts, `state` what follows from them, `filling` the decisions (all three pure);
`verify.ledger` keeps the facts. `journal` makes them true; `leasing` and `judging` are the desks of
workers and validators, `closing` the clock; `server` and `run` are the rim that does IO.
"""
