"""What makes trajectories: dispatcher, rollout workers, engines, environments."""
