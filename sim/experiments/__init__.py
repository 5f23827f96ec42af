"""Three questions about decoupled training, answered on virtual time: ``farflow sim experiment``."""
