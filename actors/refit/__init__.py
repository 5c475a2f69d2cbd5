"""The refit: a coordinator that takes the fleet through the barrier, and the transports that carry the weights."""
