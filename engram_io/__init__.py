"""N-gram table rows from NVMe: the process that brings the rows of a step into the arena ahead of the layer that needs them."""
