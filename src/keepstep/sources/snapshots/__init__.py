"""Outputs of tools that show a state: GPUs, links, network ports, processor binding, bandwidth tests.

A state is not an event: a counter holds what happened since the driver was loaded, a gauge what was last. So parsers give the
levels as context, and an event of its own only for what is a fault whenever it is seen. What differs between two samples, or
between one GPU and its peers, is for the rules of attribution.

Every parser is a function `parse(document, catalog)`. It takes pastes without beginning or end, single lines that grep left over,
and any indentation; it never raises.
"""
