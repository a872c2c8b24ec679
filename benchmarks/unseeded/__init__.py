"""Checks of unseeded pools: models, who samples from them honestly and who not, what is found."""
