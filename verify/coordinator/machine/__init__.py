"""The facts of a run, the state that follows from them, and the decisions: pure functions.

`events` are the facts, `transitions.apply` makes a `State` of them, `filling` decides what to lease
and when to close a step, `reputation` how far a worker is trusted.
"""
