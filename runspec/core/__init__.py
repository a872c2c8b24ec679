"""Shared base of all packages: the spec, signed formats, keys, model tables, run directory, HTTP.

It imports no other package of this repository and no JAX, torch or vLLM. Commands and tools
(`runspec.cli`, `lint`, `plan`, `estimate`, `lock`, `local`) import it, and it imports none of them.
"""
