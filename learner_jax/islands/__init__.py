"""Learner islands: several programs that join by exchanging pseudo-gradients (2407.07852)."""
