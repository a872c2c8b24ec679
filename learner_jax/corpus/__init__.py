"""Corpora of documents: files of text or of nucleotide sequences, and tokenizers made from them."""
