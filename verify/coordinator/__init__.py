"""The coordinator: leases work, receives submissions and verdicts, closes each step once.

`events` are the facts, `state` follows from them, `filling` decides (all three are pure).
`verify.ledger` stores the facts and `journal` records them. `leasing` serves workers, `judging`
serves validators, `closing` acts when time passes. `server` and `run` do the IO, and `edge` defends
against floods.
"""
