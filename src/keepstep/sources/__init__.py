"""Everything that can be read, turned into events: logs, tools' outputs, counters, schedulers. Nothing is decided here."""
