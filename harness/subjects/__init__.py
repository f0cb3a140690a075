"""Implementations under judgement: our reference models, the installed torch's passes, a user's own, and seeded faults."""
