"""Environments that ship: each is one file, and any of them is a template for your own."""
