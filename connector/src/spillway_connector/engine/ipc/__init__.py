"""Messages between EngineCore and the workers: of a step, samples of statistics, settings."""
