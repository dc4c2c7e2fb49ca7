"""To come: containers."""
