"""The configuration file, parsed once into frozen types."""
