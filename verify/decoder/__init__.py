"""Strangers' Parquet, decoded in a process of its own that has nothing and may do nothing."""

from verify.decoder.parent import AGAIN, Decoder, DecoderKilled

__all__ = ["AGAIN", "Decoder", "DecoderKilled"]
