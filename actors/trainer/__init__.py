"""The trainer: consumes batches, makes new policy versions, and sends weights when the barrier asks for them."""
