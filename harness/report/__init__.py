"""What a person or another program gets to see: console output, and scripts for bug reports."""
