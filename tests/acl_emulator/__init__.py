"""An ACL runtime over host memory, so that the NPU transport runs where there is no NPU. It measures nothing."""
