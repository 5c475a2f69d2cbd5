"""What runs the actors: command line, bus, broker, launcher, runtime, and what a person sees of a run."""
