"""A running release beside the values that its chart wrote: what `spillway doctor --release` finds."""
