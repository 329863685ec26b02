"""One file per frame, for any file system."""
