"""To come: colour."""
