"""The evaluator: asks policy versions held-out problems, and sends signed results."""
