"""Properties of the whole repository: its documentation, its words and the sizes of its modules."""
