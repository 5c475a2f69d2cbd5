"""The task source: pulls tasks from the producer and issues them as the buffer grants credit."""
