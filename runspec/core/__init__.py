"""The ground that every package stands on: the spec, shared formats and keys, model tables.

It imports nothing of ours and no JAX, torch or vLLM; what a person types and what starts processes
(`runspec.cli`, `lint`, `plan`, `estimate`, `lock`, `local`) stands above and is imported by nobody
below.
"""
