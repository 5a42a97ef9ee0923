"""Frozen, typed records shared by all packages, their JSON codec, and the tables that freeze names and codes."""
