"""Hypothesis strategies that draw Programs; plural nouns, keyword-only options."""
