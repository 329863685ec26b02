"""Features of the scheduler half, an object each: most of them are switched on by a setting."""
