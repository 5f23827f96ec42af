"""Three questions about decoupled training, answered on virtual time."""
