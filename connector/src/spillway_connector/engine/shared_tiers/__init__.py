"""The shared tiers as the manager uses them: opened from the configuration, driven, counted, announced."""
