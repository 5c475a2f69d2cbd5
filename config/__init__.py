"""The run's configuration: a schema that is checked whole before anything starts, and the shipped recipes."""
