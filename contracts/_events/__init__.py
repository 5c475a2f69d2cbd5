"""The parts of `contracts.events`, which alone is to be imported."""
