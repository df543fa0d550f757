"""The thin edges: what touches the world, and decides nothing."""
