"""The executable models, one module a feature, written to be read as its specification."""
