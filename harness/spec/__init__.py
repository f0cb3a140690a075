"""The values that flow through the harness: frozen, typed, free of torch."""
