"""The worker half of the connector, in each rank's process: copies between the device and the CPU tier."""
