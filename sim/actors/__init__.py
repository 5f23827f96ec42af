"""The production cores with a modelled world around each; no decision is made here."""
