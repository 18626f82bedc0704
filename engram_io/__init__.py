"""N-gram table rows from NVMe: the process that brings a step's rows into the arena ahead of their layer."""
