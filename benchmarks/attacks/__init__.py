"""Attacks that change what is sampled, against trained models and the real examiner."""
