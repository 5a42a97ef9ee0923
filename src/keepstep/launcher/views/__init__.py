"""Looking at a run from outside, and commands of a person to its coordinator."""
