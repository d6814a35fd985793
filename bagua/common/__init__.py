"""Configuration, errors, the world and operations on arrays: what every other layer stands on."""
