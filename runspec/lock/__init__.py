"""Resolves the names in a spec, on this machine and on the Hub, and compares the results."""
