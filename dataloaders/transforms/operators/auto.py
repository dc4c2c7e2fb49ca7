"""To come: auto."""
