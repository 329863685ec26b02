"""The CPU tier of a node: engines that share its rows, in random schedules and in processes that are killed."""
