"""The actors: one folder each, a pure `core.py` that decides and a shell `actor.py` that performs."""
