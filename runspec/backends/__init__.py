"""Backends that start a run on several machines; each is an entry point of `runspec.backends`."""
