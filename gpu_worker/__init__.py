"""Card executor (PyCUDA): programs on one card. The daemon starts none yet: it refuses every plan other than `cpu`."""
