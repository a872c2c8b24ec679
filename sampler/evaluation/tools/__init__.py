"""Adapters to inspect-ai, lm-eval and verifiers; none of them is imported here."""
