"""Versions of the weights: publish (the learner), load and check (engines), prune."""
