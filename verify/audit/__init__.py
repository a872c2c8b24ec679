"""`python -m verify audit`: a run's ledger replayed by somebody who trusts nobody.

Reads the run directory, and changes nothing of the run (docs/audit.md).
"""
