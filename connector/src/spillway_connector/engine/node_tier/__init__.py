"""The CPU tier in rows that the engines of a node share."""
