"""Stream processors: closed groups in, outcomes with advantages out. Knows neither workers nor trainers, nor torch."""
