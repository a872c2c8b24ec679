"""Real hidden states of models trained here, and the proofs of forgers who never saw them."""
