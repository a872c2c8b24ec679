"""Pure functions of the coordinator: events, the state that follows from them, and decisions.

`transitions.apply` folds `events` into a `State`. `filling` decides what to lease and when to close
a step. `reputation` decides how far a worker is trusted.
"""
