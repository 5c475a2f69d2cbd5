"""What a run waits for and why: a fold of its events, an analysis of the fold, and how both are shown."""
