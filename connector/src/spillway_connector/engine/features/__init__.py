"""What a setting switches on in the scheduler half, an object each."""
