"""The replay buffer: admits trajectories, completes groups, picks batches, and grants the source its credit."""
