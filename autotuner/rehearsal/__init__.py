"""A rehearsal: a server that prints, answers and takes its time like an engine, and generates nothing. No GPU needed."""
