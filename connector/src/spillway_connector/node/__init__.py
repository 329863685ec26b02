"""The CPU tier's rows as a region of the node that several engines share."""
