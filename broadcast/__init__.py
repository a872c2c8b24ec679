"""Carries each weights version from the publisher to everyone: signed, chunked, checked.

Moves named bytes and knows nothing of tensors.
"""
