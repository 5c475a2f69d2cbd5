"""The whole protocol in one process, on virtual time: real cores, simulated engines, trainer and environments."""
