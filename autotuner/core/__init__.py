"""The pure core: values in, values out; no IO, no clock, no randomness, no await."""
