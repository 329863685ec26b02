"""Routes for operators: health, metrics, live state, the page."""
