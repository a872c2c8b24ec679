"""Processes between the parent and the isolated program.

They start as `python -I -S`, once for each program, so their modules import as little as possible:
no `re`, no `dataclasses`, no `json`. Modules import each other relatively, because the launcher
knows this package as `inside`.
"""
