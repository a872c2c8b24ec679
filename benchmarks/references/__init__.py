"""Outside references for supervised training: a source of known entropy, an n-gram."""
