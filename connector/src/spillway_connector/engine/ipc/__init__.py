"""What EngineCore and the workers send each other: messages of a step, samples of statistics, settings."""
