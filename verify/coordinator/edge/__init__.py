"""The coordinator's defence against floods of requests, keys, submissions and connections.

Each part raises `Refusal` (429 with `Retry-After`, 403 or 503), so the handlers neither count nor
time clients. `docs/public-runs.md` lists the limits.
"""
