"""Limits measured for one pair of sampler and validator, and the signed profile that has them."""
