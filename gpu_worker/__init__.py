"""Card executor (PyCUDA). No program runs on a card yet: every plan other than `cpu` is refused by name."""
