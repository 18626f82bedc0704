"""N-gram table rows from NVMe. No architecture that has such tables runs yet; the package holds the place."""
