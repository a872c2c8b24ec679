"""TOPLOC proofs (arXiv 2501.16007) in numpy, byte-compatible with the `toploc` package 0.1.6.

A proof commits to the largest activations of a chunk of 32 output tokens in 258 bytes: a
polynomial over GF(65497) that gives, at each of their positions, their bf16 bits.
"""
