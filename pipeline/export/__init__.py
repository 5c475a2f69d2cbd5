"""`pipeline export`: a run's figures for other systems. It reads the log, so that no sink can hold up a run."""
