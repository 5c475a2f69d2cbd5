"""The collector: rolls out the samples of a task at the gateway, has them scored, and emits trajectories."""
