"""What every package stands on: digests, canonical JSON, signatures, roles, files, errors.

Nothing here knows of a run spec, a tensor or a rollout.
"""
