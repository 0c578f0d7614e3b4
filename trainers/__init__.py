"""What learns from outcomes: planning, batches, losses, steps, checkpoints, publishing."""
