"""Views draw records and know nothing of models, hooks or torch."""
