"""Recorder: archives every stream, journal and payload, writes the metrics, and trims what is durable."""
