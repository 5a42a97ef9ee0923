"""Events -> verdict. Pure: no input or output, no clock of its own; the catalog's weights decide, and every term can be shown."""
