"""The harness that breaks the product: every promise is tried under faults, and every planted bug must be noticed."""
