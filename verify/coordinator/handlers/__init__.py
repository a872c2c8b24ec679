"""Handlers of the coordinator, by topic: for workers, validators, islands, the operator, everybody.

A handler checks a request, decides by `verify.coordinator.machine`, and records an event in the
journal.
"""
