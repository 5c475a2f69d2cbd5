"""`pipeline top`: a run on a terminal, live or from its archive, at any of its moments."""
