"""Monitors: tools that a run logs to, each in a process that only reads the run directory."""
