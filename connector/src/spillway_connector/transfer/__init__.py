"""The scheduler's half of the shared tiers: bounded queues, deadlines, threads that verify before they publish."""
